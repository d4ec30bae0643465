// Engine blocks ◄► payloads, and the witness of both: the only code of lmtier that runs on a GPU.
//
// Nothing is included, no thread waits for another, and every kernel is right with any grid: how many SMs
// are used is a matter of speed alone. Compiled by NVRTC; tests run the same source on a CPU, with LOAD and
// STORE replaced by ones that check every access.
//
//     gather, scatter    words of 16 to 1 bytes, by Piece             the copy
//     sums, chain, merge xxh3-64 of the engine's bytes, by Raw        the witness; shares only the ids

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef LOAD
#define LOAD(address) (*(address))
#define STORE(address, value) (*(address) = (value))
#endif

#define AXES 4
#define BLOCKS 1000
#define THREADS 256  // of a thread block at most; three fit on an SM, four would spill registers

// Where the payloads are and which blocks make them: an argument, so that nothing must outlive a launch.
struct Batch {
  u64 payload;        // of the first chunk
  u64 apart;          // from one payload to the next
  int block[BLOCKS];  // chunk by chunk; negative: there is no such block, pass it over
  u32 chunks;
  u32 blocks;         // of each chunk
};

// One tensor of one layer: the same axes with two sets of strides. All but counts are bytes.
struct Piece {
  u64 base;         // address of block 0
  u64 at;           // where the chunk's block 0 begins in a payload
  i64 step;         // from a block to the next
  i64 place;        // the same in the payload
  i64 ours[AXES];   // strides of the axes, outermost first
  i64 theirs[AXES];
  u32 count[AXES];
  u32 run;          // what lies together in both, once for each index of the axes
  u32 width;        // 16, 8, 4, 2 or 1: divides all of the above
};

static __device__ u64 lowest_bit(u64 value) { return value & (~value + 1); }

#define AHEAD 4  // words that a thread has under way

template <typename Word, bool OUT>
static __device__ void copy_words(const Piece &piece, u64 engine, u64 payload) {
  const u32 inner = piece.run / (u32)sizeof(Word);
  const u32 axes = piece.count[0] * piece.count[1] * piece.count[2] * piece.count[3];
  const u32 words = inner * axes;
  const u32 stride = gridDim.y * blockDim.x;
  for (u32 begin = blockIdx.y * blockDim.x + threadIdx.x; begin < words; begin += stride * AHEAD) {
    Word word[AHEAD];
    u64 to[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const u32 number = begin + i * stride;
      if (number >= words) break;
      u64 from = engine + (u64)number * sizeof(Word);
      to[i] = payload + (u64)number * sizeof(Word);
      if (axes > 1) {
        u32 rest = number / inner;
        from = engine + (u64)(number - rest * inner) * sizeof(Word);
        to[i] = payload + (from - engine);
#pragma unroll
        for (int axis = AXES - 1; axis >= 0; axis--) {
          const u32 index = rest % piece.count[axis];
          rest /= piece.count[axis];
          from += (u64)(piece.ours[axis] * index);
          to[i] += (u64)(piece.theirs[axis] * index);
        }
      }
      if (!OUT) {
        const u64 swapped = from;
        from = to[i];
        to[i] = swapped;
      }
      word[i] = LOAD((const Word *)from);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (begin + i * stride >= words) break;
      STORE((Word *)to[i], word[i]);
    }
  }
}

template <bool OUT>
static __device__ void copy_blocks(const Piece *pieces, u32 count, const Batch &batch) {
  const u32 rows = batch.chunks * batch.blocks;
  for (u32 item = blockIdx.x; item < count * rows; item += gridDim.x) {
    const u32 row = item % rows;
    const int block = batch.block[row];
    if (block < 0) continue;
    const Piece &piece = pieces[item / rows];
    const u64 engine = piece.base + (u64)(piece.step * block);
    const u64 payload =
        batch.payload + batch.apart * (row / batch.blocks) + piece.at + (u64)(piece.place * (row % batch.blocks));
    u64 width = lowest_bit(payload);  // a payload may begin anywhere
    if (width == 0 || width > piece.width) width = piece.width;
    switch (width) {
      case 16: copy_words<uint4, OUT>(piece, engine, payload); break;
      case 8: copy_words<u64, OUT>(piece, engine, payload); break;
      case 4: copy_words<u32, OUT>(piece, engine, payload); break;
      case 2: copy_words<u16, OUT>(piece, engine, payload); break;
      default: copy_words<u8, OUT>(piece, engine, payload);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) gather(const Piece *pieces, u32 count, const __grid_constant__ Batch batch) {
  copy_blocks<true>(pieces, count, batch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) scatter(const Piece *pieces, u32 count, const __grid_constant__ Batch batch) {
  copy_blocks<false>(pieces, count, batch);
}

// ---- the witness
//
// A mark is the xxh3-64 of one layer's bytes of one chunk: tensor by tensor, block by block, each in memory
// order. xxh3 cuts these into parts of 1 KiB; within a part it only adds up, so `sums` does every part at
// once, `chain` stirs the sums together in order, and `merge` makes one number of the lanes. Streams of up to
// 240 bytes are hashed another way: they have no mark here.

// One tensor of one layer in memory order.
struct Raw {
  u64 base;
  i64 step;
  i64 stride[AXES];
  u32 count[AXES];
  u32 run;   // bytes in one piece
  u32 size;  // of a block: run * counts
};

#define LANES 8
#define STRIPE 64
#define PART 1024

#define P32_1 0x9E3779B1U
#define P32_2 0x85EBCA77U
#define P32_3 0xC2B2AE3DU
#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_3 0x165667B19E3779F9ULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define P64_5 0x27D4EB2F165667C5ULL
#define AVALANCHE 0x165667919E3779F9ULL
#define LAST_KEY 121  // where in the secret the keys of the last stripe begin
#define MERGE_KEY 11

// The algorithm's secret, as little-endian words.
static __device__ const u64 SECRET[24] = {
    0xbe4ba423396cfeb8ULL, 0x1cad21f72c81017cULL, 0xdb979083e96dd4deULL, 0x1f67b3b7a4a44072ULL,
    0x78e5c0cc4ee679cbULL, 0x2172ffcc7dd05a82ULL, 0x8e2443f7744608b8ULL, 0x4c263a81e69035e0ULL,
    0xcb00c391bb52283cULL, 0xa32e531b8b65d088ULL, 0x4ef90da297486471ULL, 0xd8acdea946ef1938ULL,
    0x3f349ce33f76faa8ULL, 0x1d4f0bc7c7bbdcf9ULL, 0x3159b4cd4be0518aULL, 0x647378d9c97e9fc8ULL,
    0xc3ebd33483acc5eaULL, 0xeb6313faffa081c5ULL, 0x49daf0b751dd0d17ULL, 0x9e68d429265516d3ULL,
    0xfca1477d58be162bULL, 0xce31d07ad1b8f88fULL, 0x280416958f3acb45ULL, 0x7e404bbbcafbd7afULL,
};

static __device__ u64 secret(u32 at) {
  const u32 word = at / 8, shift = at % 8 * 8;
  return shift ? SECRET[word] >> shift | SECRET[word + 1] << (64 - shift) : SECRET[word];
}

struct Stream {
  const Raw *tensors;
  const int *block;
  u32 blocks;
};

static __device__ u64 address(const Stream &stream, u32 at) {
  const Raw *tensor = stream.tensors;
  while (at >= stream.blocks * tensor->size) at -= stream.blocks * tensor++->size;
  const u32 number = at / tensor->size;
  at -= number * tensor->size;
  u32 rest = at / tensor->run;
  u64 found = tensor->base + (u64)(tensor->step * stream.block[number]) + (at - rest * tensor->run);
  for (int axis = AXES - 1; axis >= 0; axis--) {
    found += (u64)(tensor->stride[axis] * (rest % tensor->count[axis]));
    rest /= tensor->count[axis];
  }
  return found;
}

static __device__ u64 eight_bytes(const Stream &stream, u32 at, bool together) {
  const u64 first = address(stream, at);
  if (together && first % 8 == 0) return LOAD((const u64 *)first);
  u64 value = 0;
  for (u32 i = 0; i < 8; i++)
    value |= (u64)LOAD((const u8 *)address(stream, at + i)) << (8 * i);
  return value;
}

// Adds one stripe to two lanes.
static __device__ void add(u64 sum[2], const Stream &stream, u32 at, u32 lane, u32 key, bool together) {
  const u64 a = eight_bytes(stream, at + lane * 8, together);
  const u64 b = eight_bytes(stream, at + lane * 8 + 8, together);
  const u64 x = a ^ secret(key + lane * 8), y = b ^ secret(key + lane * 8 + 8);
  sum[0] += b + (x & 0xFFFFFFFFU) * (x >> 32);
  sum[1] += a + (y & 0xFFFFFFFFU) * (y >> 32);
}

// Layers that are alike lie one after the other in `tensors`, `count` each. `out` takes, for each layer and
// each chunk, the sums of its parts, LANES words each; the last part is cut short.
extern "C" __global__ void sums(const Raw *tensors, u32 count, u32 length, u32 layers,
                                const __grid_constant__ Batch batch, u64 *out) {
  const u32 parts = (length - 1) / PART + 1, pairs = LANES / 2;
  bool together = length % 8 == 0;  // else the last stripe begins anywhere
  for (u32 i = 0; i < count; i++) together = together && tensors[i].run % 8 == 0;
  const u32 items = layers * batch.chunks * parts * pairs;
  for (u32 item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += gridDim.x * blockDim.x) {
    const u32 lane = item % pairs * 2, part = item / pairs % parts, row = item / pairs / parts;
    const u32 chunk = row % batch.chunks, layer = row / batch.chunks;
    const Stream stream = {tensors + layer * count, batch.block + chunk * batch.blocks, batch.blocks};
    const u32 begin = part * PART;
    const bool last = part == parts - 1;
    const u32 stripes = last ? (length - 1 - begin) / STRIPE : PART / STRIPE;
    u64 sum[2] = {0, 0};
    for (u32 stripe = 0; stripe < stripes; stripe++)
      add(sum, stream, begin + stripe * STRIPE, lane, stripe * 8, together);
    if (last) add(sum, stream, length - STRIPE, lane, LAST_KEY, together);
    u64 *place = out + ((u64)row * parts + part) * LANES + lane;
    STORE(place, sum[0]);
    STORE(place + 1, sum[1]);
  }
}

static __device__ u64 fold(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }

// A thread for each lane of a row, which is a chunk's layer: the sums of its parts, stirred together in their
// order, into the first.
extern "C" __global__ void chain(u64 *sums, u32 length, u32 rows) {
  const u32 parts = (length - 1) / PART + 1;
  const u64 begin[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
  const u32 items = rows * LANES;
  for (u32 item = blockIdx.x * blockDim.x + threadIdx.x; item < items; item += gridDim.x * blockDim.x) {
    const u32 lane = item % LANES;
    u64 *sum = sums + (u64)(item / LANES) * parts * LANES + lane;
    u64 value = 0;
#pragma unroll
    for (u32 i = 0; i < LANES; i++) value = i == lane ? begin[i] : value;
    const u64 key = SECRET[16 + lane];
#pragma unroll 8
    for (u32 part = 0; part < parts - 1; part++) {
      value += LOAD(sum + (u64)part * LANES);
      value = (value ^ value >> 47 ^ key) * P32_1;
    }
    value += LOAD(sum + (u64)(parts - 1) * LANES);
    STORE(sum, value);
  }
}

// A thread for each row: its mark, from its lanes. The marks of a layer lie `across` after those of the last.
extern "C" __global__ void merge(const u64 *sums, u32 length, u32 rows, u32 chunks, u32 across, u64 *marks) {
  const u32 parts = (length - 1) / PART + 1;
  for (u32 row = blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += gridDim.x * blockDim.x) {
    const u64 *lane = sums + (u64)row * parts * LANES;
    u64 mark = length * P64_1;
#pragma unroll
    for (u32 i = 0; i < LANES; i += 2) {
      const u32 key = MERGE_KEY + 8 * i;
      mark += fold(LOAD(lane + i) ^ secret(key), LOAD(lane + i + 1) ^ secret(key + 8));
    }
    mark = (mark ^ mark >> 37) * AVALANCHE;
    STORE(marks + row / chunks * across + row % chunks, mark ^ mark >> 32);
  }
}
