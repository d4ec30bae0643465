// Enough of CUDA to run lmtier/copy/cuda/kernels.cu on a CPU: threads one after another, in any order, and every
// access checked: it must lie in memory that was named, and be aligned, as a GPU demands.
//
// Compiled with -DKERNELS="…/kernels.cu". Launches have the shape of cuLaunchKernel: a name, a grid, and an
// array of pointers to the arguments.
#include <cstdint>
#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
};
static dim3 gridDim, blockDim, blockIdx, threadIdx;

static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

// ---- memory

using Ranges = std::map<uint64_t, uint64_t>;  // begin -> end, disjoint
static Ranges known, was_read, was_written;
static std::string trouble;
static bool tracing;

static void note(Ranges &ranges, uint64_t begin, uint64_t end) {
  auto at = ranges.upper_bound(begin);
  if (at != ranges.begin() && std::prev(at)->second >= begin) --at;
  while (at != ranges.end() && at->first <= end) {
    begin = std::min(begin, at->first);
    end = std::max(end, at->second);
    at = ranges.erase(at);
  }
  ranges[begin] = end;
}

static bool check(uint64_t begin, uint64_t size, uint64_t alignment, const char *what) {
  const char *wrong = nullptr;
  auto at = known.upper_bound(begin);
  if (at == known.begin() || std::prev(at)->second < begin + size) wrong = "outside of all memory";
  if (begin % alignment) wrong = "misaligned";
  if (wrong && trouble.empty())
    trouble = std::string(what) + " of " + std::to_string(size) + " bytes, " + wrong;
  return !wrong;
}

template <typename Word> static Word load(const Word *address) {
  const auto at = reinterpret_cast<uint64_t>(address);
  Word word = {};
  if (check(at, sizeof(Word), sizeof(Word), "a load")) {
    std::memcpy(&word, address, sizeof(Word));
    if (tracing) note(was_read, at, at + sizeof(Word));
  }
  return word;
}

template <typename Word> static void store(Word *address, std::type_identity_t<Word> word) {
  const auto at = reinterpret_cast<uint64_t>(address);
  if (check(at, sizeof(Word), sizeof(Word), "a store")) {
    std::memcpy(address, &word, sizeof(Word));
    if (tracing) note(was_written, at, at + sizeof(Word));
  }
}

#define LOAD(address) load(address)
#define STORE(address, value) store(address, value)
#include KERNELS

// ---- launches

template <typename... Args, size_t... I>
static void call(void (*kernel)(Args...), void **args, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_const_t<Args> *>(args[I])...);
}

template <typename... Args> static void over_grid(void (*kernel)(Args...), void **args, bool backwards) {
  const uint64_t threads = uint64_t(gridDim.x) * gridDim.y * blockDim.x;
  for (uint64_t number = 0; number < threads; number++) {
    const uint64_t at = backwards ? threads - 1 - number : number;
    threadIdx = {unsigned(at % blockDim.x), 0, 0};
    blockIdx = {unsigned(at / blockDim.x % gridDim.x), unsigned(at / blockDim.x / gridDim.x), 0};
    call(kernel, args, std::index_sequence_for<Args...>{});
  }
}

extern "C" {
// Empty, or the first access that would have been wrong on a GPU.
const char *launch(const char *name, unsigned x, unsigned y, unsigned threads, void **args, int backwards) {
  trouble.clear();
  gridDim = {x, y, 1};
  blockDim = {threads, 1, 1};
  const std::string kernel = name;
  if (kernel == "gather") over_grid(gather, args, backwards);
  else if (kernel == "scatter") over_grid(scatter, args, backwards);
  else if (kernel == "sums") over_grid(sums, args, backwards);
  else if (kernel == "chain") over_grid(chain, args, backwards);
  else if (kernel == "merge") over_grid(merge, args, backwards);
  else trouble = "no kernel " + kernel;
  return trouble.c_str();
}

void add_memory(uint64_t begin, uint64_t size) { known[begin] = begin + size; }
void forget_memory() { known.clear(); }

void trace(int on) {
  tracing = on;
  was_read.clear();
  was_written.clear();
}

// Pairs of begin and end; how many there are, also if `room` is less.
uint64_t traced(int writes, uint64_t *out, uint64_t room) {
  uint64_t count = 0;
  for (const auto &[begin, end] : writes ? was_written : was_read) {
    if (count < room) {
      out[2 * count] = begin;
      out[2 * count + 1] = end;
    }
    count++;
  }
  return count;
}

// ---- the driver's calls, with the prototypes of CUDA 13.0's cuda.h; a function is its name, a stream STREAM

#define STREAM reinterpret_cast<void *>(0x123456789ABCDEF0)

struct CUmemcpyAttributes {
  int source_access_order;
  struct { int type, id; } source_hint, to_hint;
  unsigned flags;
};

int cuGetErrorString(int, const char **text) {
  *text = "invalid argument";
  return 0;
}

int cuLaunchKernel(const char *function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty,
                   unsigned tz, unsigned shared_bytes, void *stream, void **arguments, void **extra) {
  if (z != 1 || ty != 1 || tz != 1 || shared_bytes || extra || stream != STREAM) return 1;
  return *launch(function, x, y, tx, arguments, 0) ? 1 : 0;
}

int cuMemcpyAsync(uint64_t to, uint64_t source, size_t nbytes, void *stream) {
  if (stream != STREAM) return 1;
  std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(source), nbytes);
  return 0;
}

struct CUDA_MEMCPY2D {
  size_t source_x, source_y;
  int source_type;
  const void *source_host;
  uint64_t source;
  void *source_array;
  size_t source_pitch, to_x, to_y;
  int to_type;
  void *to_host;
  uint64_t to;
  void *to_array;
  size_t to_pitch, width, height;
};

int cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, void *stream) {
  const bool plain = !copy->source_x && !copy->source_y && !copy->to_x && !copy->to_y;
  const bool unified = copy->source_type == 4 && copy->to_type == 4;
  if (!plain || !unified || copy->source_pitch < copy->width || copy->to_pitch < copy->width) return 1;
  if (copy->source_pitch >> 31 || copy->to_pitch >> 31) return 1;
  for (size_t i = 0; i < copy->height; i++) {
    const uint64_t to = copy->to + i * copy->to_pitch, source = copy->source + i * copy->source_pitch;
    if (cuMemcpyAsync(to, source, copy->width, stream)) return 1;
  }
  return 0;
}

int cuMemcpyBatchAsync_v2(uint64_t *to, uint64_t *source, size_t *nbytes, size_t count,
                          CUmemcpyAttributes *attributes, size_t *begins, size_t kinds, void *stream) {
  const bool fits = attributes->source_access_order == 1 && !attributes->flags && !attributes->to_hint.id;
  if (!fits || kinds != 1 || *begins || count > 4096) return 1;
  for (size_t i = 0; i < count; i++)
    if (cuMemcpyAsync(to[i], source[i], nbytes[i], stream)) return 1;
  return 0;
}

int cuDeviceGetAttribute(int *says, int attribute, int device) {
  *says = attribute == 91 && device == 7;  // 91: host pointers are good for registered memory
  return 0;
}

// The mode of this thread: 0 global, 1 of the thread, 2 relaxed. Tells the one before.
int cuThreadExchangeStreamCaptureMode(int *mode) {
  static thread_local int current = 0;
  std::swap(*mode, current);
  return 0;
}

uint64_t size_of(const char *type) {
  const std::string name = type;
  return name == "Piece" ? sizeof(Piece) : name == "Raw" ? sizeof(Raw) : name == "Batch" ? sizeof(Batch) : 0;
}
}
