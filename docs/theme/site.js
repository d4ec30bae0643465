// What the pages do beyond HTML: light or dark, copying a block, and where search results are shown.
"use strict";

const root = document.documentElement;
document.getElementById("theme").onclick = () => {
  const dark = getComputedStyle(root).colorScheme === "dark" ||
    (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme) } catch {}
};

// A session with prompts is copied without them, and without what was printed.
const commands = text =>
  /^\$ /m.test(text) ? text.split("\n").filter(line => line.startsWith("$ ")).map(line => line.slice(2)).join("\n") : text;
for (const block of document.querySelectorAll(".highlight:not(.language-text, .doc-signature)")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "copy";
  button.onclick = async () => {
    await navigator.clipboard.writeText(commands(block.querySelector("code").textContent).trimEnd());
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy" }, 1500);
  };
  block.append(button);
}

// The index of MkDocs is read by its worker, once it is needed.
const query = document.getElementById("query");
const results = document.getElementById("results");
const site = new URL(query.dataset.site + "/", location);
let worker, isReady = false;
const ask = () => {
  results.hidden = query.value.trim().length < 3;
  if (!worker) {
    worker = new Worker(new URL("search/worker.js", site));
    worker.onmessage = ({ data }) => {
      isReady ||= data.allowSearch;
      if (data.allowSearch) ask(); else if (data.results) draw(data.results);
    };
    worker.postMessage({ init: true });
  } else if (isReady && !results.hidden) worker.postMessage({ query: query.value });
};
const draw = found => {
  results.replaceChildren(...found.slice(0, 20).flatMap(({ location, title, summary }) => {
    const link = Object.assign(document.createElement("a"), { href: new URL(location, site), textContent: title });
    return [link, Object.assign(document.createElement("p"), { textContent: summary })];
  }));
  if (!found.length) results.textContent = "Nothing found";
};
query.addEventListener("input", ask);
query.addEventListener("focus", ask);
document.addEventListener("click", event => { if (!event.target.closest("form")) results.hidden = true });
document.addEventListener("keydown", event => {
  if (event.key === "Escape") results.hidden = true;
  if (event.key === "/" && document.activeElement === document.body) { event.preventDefault(); query.focus() }
});

// The menu shows where the reader is; `scrollIntoView` would move the page with it.
const menu = document.getElementById("menu");
const here = menu.querySelector("[aria-current]");
if (here) menu.scrollTop += here.getBoundingClientRect().top - menu.getBoundingClientRect().top - menu.clientHeight / 2;
