// A program that tries every kernel with every instruction set of the machine, and prints a line for each: set, kernel,
// checksum. It needs neither Python nor a model, so that it runs under sanitizers and on emulated boards. All memory that it
// hands over is as large as promised and no larger. It fails where company, cuts or threads change a result, and where a number
// that is not finite does not reach the results that depend on it, or reaches others. With a number as argument it tries no more
// than so many instruction sets.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "block_types.h"

extern "C" {
const char* mdi_instruction_sets(void);
int mdi_force(const char* name);
void* mdi_context_new(int n_threads, int spins);
void mdi_context_delete(void* context);
int mdi_forward(void* context, const MdiStage* stage, const MdiFrame* frame);
int mdi_half(void* context, const MdiStage* stage, int block, int half, const MdiFrame* frame, float* y);
int mdi_linear(void* context, const MdiNorm*, const MdiMatrix*, float softcap, const float* x, int n, float* y);
void mdi_function(int which, const float* x, int64_t n, float* y);
void mdi_pack_int4(const float* rows, int n_panels, int width, const float* factors, int n_factors, uint8_t* to);
}

using Floats = std::vector<float>;

static void require(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

// The same numbers on every machine.
struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 2654435761u + 1) {}
  uint32_t bits() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 40);  // 24 bits
  }
  float number() { return (float)(int32_t)(bits() - (1 << 23)) / (float)(1 << 23); }  // in [-1, 1)
  Floats numbers(size_t n, float size = 1.0f, float middle = 0.0f) {
    Floats x(n);
    for (float& a : x) a = middle + size * number();
    return x;
  }
};

static void print(const char* set, const std::string& kernel, const Floats& y) {
  uint64_t sum = 14695981039346656037u;  // FNV-1a over the bits
  for (float a : y) {
    require(std::isfinite(a), kernel + " is not finite");
    uint32_t bits;
    std::memcpy(&bits, &a, sizeof bits);
    sum = (sum ^ bits) * 1099511628211u;
  }
  std::printf("%s %s %016llx\n", set, kernel.c_str(), (unsigned long long)sum);
}

static bool all_finite(const float* x, size_t n, bool expected) {  // or none
  for (size_t i = 0; i < n; i++)
    if (std::isfinite(x[i]) != expected) return false;
  return true;
}

static const float kNotFinite[] = {NAN, INFINITY, -INFINITY};

static bool same(const Floats& a, const Floats& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof(float));
}

// ---- packed weights of chance, as layout.py describes them

static const char* const kFormats[] = {"float32", "bf16", "fp16", "int8", "int4", "mxfp4", "q8_0", "q4_1", "q5_0", "q5_1",
                                       "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"};

static uint16_t half_near(Random& random, int exponent) {  // +-2^exponent and up to twice that
  return (uint16_t)(random.bits() % 2 << 15 | (uint32_t)(exponent + 15) << 10 | random.bits() % 1024);
}

static void fill_line(Random& random, int format, bool scales, uint8_t* line) {
  for (int i = 0; i < 64; i++) {
    if (format == kInt8) line[i] = (uint8_t)(1 + random.bits() % 255);
    if (format == kMxfp4) line[i] = (uint8_t)(scales ? 110 + random.bits() % 14 : random.bits());
    if (format == kInt4) line[i] = (uint8_t)((1 + random.bits() % 15) | (1 + random.bits() % 15) << 4);
  }
  for (int i = 0; i < 32 && format != kMxfp4; i++) {
    float number = 0.1f * random.number();
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    uint16_t two = format == kBf16 ? (uint16_t)(bits >> 16) : half_near(random, -5);
    if (scales) two = half_near(random, format == kInt8 ? -10 : -7) & 0x7fff;
    if (scales || format == kBf16 || format == kFp16) std::memcpy(line + 2 * i, &two, 2);
    if (format == kFloat32 && i < 16) std::memcpy(line + 4 * i, &number, 4);
  }
}

static int record_inputs(int format) {
  const int inputs[] = {1, 2, 2, 128, 64, 128};
  return format < kQ8_0 ? inputs[format] : 64 * record_shape(format).steps;
}
static int record_lines(int format) {
  const int lines[] = {1, 1, 1, 33, 9, 17};
  return format < kQ8_0 ? lines[format] : record_shape(format).bytes / 64;
}

// A record of a block type: halves of about +-2^exponent, and random bytes.
static void fill_record(Random& random, int format, uint8_t* record) {
  const BlockType& t = block_type(format);
  RecordShape shape = record_shape(format);
  for (int i = 0; i < shape.bytes; i++) record[i] = (uint8_t)random.bits();
  for (int i = 0; i < 16 * shape.blocks * t.halves; i++) {
    uint16_t half = half_near(random, t.bytes ? -14 : t.offset == 128 ? -10 : -7);
    std::memcpy(record + 2 * i, &half, 2);
  }
}

struct Weight {
  uint8_t* data;
  Floats bias;
  MdiMatrix matrix;

  Weight(Random& random, int format, int n_out, int n_in, bool with_bias = false) {
    int inputs = record_inputs(format), lines = record_lines(format);
    size_t n_records = (size_t)((n_out + 15) / 16) * ((n_in + inputs - 1) / inputs);
    data = (uint8_t*)std::aligned_alloc(64, 64 * n_records * lines);
    for (size_t i = 0; i < n_records * lines; i++) {
      if (format < kQ8_0) fill_line(random, format, format >= kInt8 && i % lines == 0, data + 64 * i);
      else if (i % lines == 0) fill_record(random, format, data + 64 * i);
    }
    if (with_bias) bias = random.numbers(n_out);
    matrix = {data, with_bias ? bias.data() : nullptr, format, n_out, n_in, 0};
  }
  ~Weight() { std::free(data); }
  Weight(const Weight&) = delete;
};

struct Context {
  void* handle;
  explicit Context(int n_threads) : handle(mdi_context_new(n_threads, 100)) { require(handle, "no context"); }
  ~Context() { mdi_context_delete(handle); }
};

// ---- functions and linear layers

static void try_functions(const char* set) {
  const char* const names[] = {"exp", "tanh", "erf", "silu", "gelu", "gelu_tanh"};
  Random random(1);
  Floats x = random.numbers(1003, 20.0f), y(x.size());
  for (int f = 0; f < 6; f++) {
    mdi_function(f, x.data(), (int64_t)x.size(), y.data());
    print(set, names[f], y);
    float nan[3] = {1.0f, NAN, -1.0f};
    mdi_function(f, nan, 3, nan);
    require(std::isfinite(nan[0]) && std::isnan(nan[1]) && std::isfinite(nan[2]), std::string(names[f]) + " loses NaN");
  }
}

static void try_packing(const char* set) {
  constexpr int kWidth = 192, kBytes = 2 * (kWidth / 64) * 9 * 64;
  Floats rows = Random(5).numbers((size_t)32 * kWidth), factors = {-0.125f, -0.11f, -0.1f}, y(kBytes);
  uint8_t* packed = (uint8_t*)std::aligned_alloc(64, kBytes);
  mdi_pack_int4(rows.data(), 2, kWidth, factors.data(), (int)factors.size(), packed);
  for (int i = 0; i < kBytes; i++) y[i] = packed[i];
  std::free(packed);
  print(set, "pack-int4", y);
}

static void try_linear(const char* set, int format, int n_out, int n_in) {
  Random random(2);
  Weight w(random, format, n_out, n_in, true);
  Floats gain = random.numbers(n_in, 0.5f, 1.0f);
  MdiNorm none{}, norm{gain.data(), nullptr, kRmsNorm, 0, 1e-5f, 0};
  Context one(1), three(3);
  constexpr int kRows = 13;
  Floats rows = random.numbers((size_t)kRows * n_in), alone((size_t)kRows * n_out);
  rows[7] = 60.0f;  // one that is far larger than the rest of its group
  for (int m = 0; m < kRows; m++)
    require(!mdi_linear(one.handle, &norm, &w.matrix, 0, &rows[(size_t)m * n_in], 1, &alone[(size_t)m * n_out]), "memory");
  std::string name = std::string("linear-") + kFormats[format] + "-" + std::to_string(n_out) + "x" + std::to_string(n_in);
  for (int n : {2, 3, 4, 5, 6, 8, kRows}) {
    Floats y((size_t)n * n_out);
    void* context = n % 2 ? three.handle : one.handle;
    require(!mdi_linear(context, &norm, &w.matrix, 0, rows.data(), n, y.data()), "memory");
    require(!std::memcmp(y.data(), alone.data(), y.size() * sizeof(float)), name + " depends on company or threads");
  }
  print(set, name, alone);
  Floats y((size_t)kRows * n_out);
  constexpr float kCap = 3.0f;
  require(!mdi_linear(three.handle, &none, &w.matrix, kCap, rows.data(), kRows, y.data()), "memory");
  print(set, name + "-capped", y);
  for (float bad : kNotFinite)
    for (int place : {0, 7, 31, 63, n_in - 1}) {
      Floats damaged = rows, z(y.size());
      damaged[(size_t)5 * n_in + place] = bad;
      for (int n : {1, 7, kRows}) {  // row 5 alone, in a tile, and for a matrix unit
        const float* x = n == 1 ? &damaged[(size_t)5 * n_in] : damaged.data();
        require(!mdi_linear(three.handle, &none, &w.matrix, kCap, x, n, z.data()), "memory");
        size_t before = n == 1 ? 0 : (size_t)5 * n_out, end = before + n_out, all = (size_t)n * n_out;
        require(all_finite(&z[before], n_out, false), name + " hides a number that is not finite");
        require(n == 1 || (!std::memcmp(z.data(), y.data(), before * sizeof(float)) &&
                           !std::memcmp(&z[end], &y[end], (all - end) * sizeof(float))),
                name + " spreads a number that is not finite");
      }
    }
}

// The largest sums that bytes can make: all weights of one value, all activations +-127. Sums in 16 bits must hold them.
static void try_extremes(const char* set) {
  constexpr int kIn = 256, kOut = 16, kRows = 13;
  struct Extreme { int format; uint8_t byte; float value; };  // of int8 with an offset of 128, of int4 with one of 8
  Context context(1);
  MdiNorm none{};
  for (Extreme e : {Extreme{kInt8, 255, 127}, Extreme{kInt8, 1, -127}, Extreme{kInt4, 0xff, 7}, Extreme{kInt4, 0x00, -8},
                    Extreme{kMxfp4, 0x77, 6}, Extreme{kMxfp4, 0xff, -6}}) {
    size_t lines = record_lines(e.format), n_lines = (size_t)kIn / record_inputs(e.format) * lines;
    uint8_t* data = (uint8_t*)std::aligned_alloc(64, 64 * n_lines);
    for (size_t i = 0; i < n_lines; i++) {
      bool scales = i % lines == 0;
      uint16_t one = 0x3c00;
      std::memset(data + 64 * i, scales ? 127 : e.byte, 64);
      for (int k = 0; scales && e.format != kMxfp4 && k < 32; k++) std::memcpy(data + 64 * i + 2 * k, &one, 2);
    }
    MdiMatrix w = {data, nullptr, e.format, kOut, kIn, 0, nullptr, 0, 0};
    for (float sign : {1.0f, -1.0f}) {
      Floats x((size_t)kRows * kIn, sign), y((size_t)kRows * kOut);
      require(!mdi_linear(context.handle, &none, &w, 0, x.data(), kRows, y.data()), "memory");
      for (float a : y)
        require(std::fabs(a / (sign * e.value * kIn) - 1) < 1e-5f, std::string(set) + ": sums of " + kFormats[e.format] + " overflow");
    }
    std::free(data);
  }
}

// The same of block types: their sums must be those of other instruction sets.
static void try_extreme_blocks(const char* set) {
  constexpr int kIn = 256, kOut = 16, kRows = 13;
  Context context(1);
  MdiNorm none{};
  for (int format = kQ8_0; format <= kIq4_xs; format++) {
    Random random(6);
    Weight w(random, format, kOut, kIn);
    Floats all;
    for (int byte : {0x00, 0x7f, 0xff})
      for (float sign : {1.0f, -1.0f}) {
        RecordShape shape = record_shape(format);
        for (int at = 0; at < kIn / record_inputs(format) * shape.bytes; at += shape.bytes)
          std::memset(w.data + at + shape.header, byte, (size_t)(shape.bytes - shape.header));
        Floats x((size_t)kRows * kIn, sign), y((size_t)kRows * kOut);
        require(!mdi_linear(context.handle, &none, &w.matrix, 0, x.data(), kRows, y.data()), "memory");
        all.insert(all.end(), y.begin(), y.end());
      }
    print(set, std::string("extreme-") + kFormats[format], all);
  }
}

// ---- blocks

constexpr int kLength = 70, kPage = 32, kBadRow = 37, kColumns = 25;
constexpr int kKept = 10, kRoom = kKept + kLength;  // rows that states can go back over at least, and that there is memory for

struct Shape {
  const char* name;
  int format, cache_type;
  bool layer_norm, parallel, interleaved, experts, window;
  bool gated;  // and values made of keys, norms of experts, and a scalar
  bool latent = false;  // and experts in groups
  bool delta = false;  // gated delta nets in place of attention, or gates of attention beside `gated`; and of a shared expert
};

// One block of attention and MLP or experts, with everything that the shape asks for.
struct Stage {
  Random random{3};
  std::vector<Weight*> weights;
  std::vector<Floats*> floats;
  std::vector<MdiMlp> experts;
  std::vector<MdiMatrix> up_k, up_v;
  MdiBlock block{};
  MdiStage stage{};
  Floats cos, sin;
  int32_t norm_type = kRmsNorm, unit_offset = 0;

  explicit Stage(const Shape& s) {
    stage.n_classes = 1;
    MdiAttention& attention = block.attention;
    attention.n_head = 4, attention.n_groups = 2, attention.head_size = 20, attention.queries_per_group = 2;
    attention.n_keys = 2, attention.n_values = s.gated ? 0 : 2;
    attention.rope_n_elem = s.interleaved ? 12 : 20, attention.rope_interleaved = s.interleaved;
    attention.cache_type = s.cache_type, attention.scale = 0.22f, attention.softcap = s.window ? 20.0f : 0.0f;
    block.residual = s.parallel ? kParallel : kSequential, block.norm_is_shared = s.parallel;
    norm_type = s.layer_norm ? kLayerNorm : kRmsNorm, unit_offset = s.window;
    block.norm_1 = norm(72, s.layer_norm), block.norm_2 = norm(72, s.layer_norm);
    if (s.window) block.post_attention_norm = norm(72, false), block.post_mlp_norm = norm(72, false);
    if (s.interleaved) attention.norm_q = norm(20, false), attention.norm_k = norm(20, false);
    attention.qkv = matrix(s, (4 + 2 + attention.n_values) * 20, 72), attention.proj = matrix(s, 72, 80);
    block.mlp = mlp(s);
    attention.window = s.window ? 21 : 0;
    if (s.experts) {
      for (int e = 0; e < 5; e++) experts.push_back(mlp(s));
      weights.push_back(new Weight(random, kFloat32, 5, 72));
      block.experts.router = weights.back()->matrix, block.experts.experts = experts.data();
      block.experts.n = 5, block.experts.n_used = 2, block.experts.scale = 1.0f;
    }
    if (s.latent) make_latent(s);
    if (s.gated) {
      attention.norm_v = norm(20, false);
      block.gated = {matrix(s, 21, 72), matrix(s, 72, 21), norm(72, false), kGeluTanh, 3};
      block.scalar = norm(1, false).weight;
    }
    if (s.delta && s.gated) {
      attention.out_gate = matrix(s, 80, 72);
      weights.push_back(new Weight(random, kFloat32, 1, 72));
      block.experts.shared_gate = weights.back()->matrix;
    } else if (s.delta) {
      MdiDelta& of = block.delta;
      of.n_head = 6, of.n_groups = 2, of.k_size = 21, of.v_size = 40, of.n_taps = 3, of.is_in_turn = s.interleaved, of.scale = 0.22f;
      of.qkv = matrix(s, 2 * 2 * 21 + 6 * 40, 72), of.out_gate = matrix(s, 6 * 40, 72), of.proj = matrix(s, 72, 6 * 40);
      weights.push_back(new Weight(random, kFloat32, 2 * 6, 72));
      of.gates = weights.back()->matrix, of.norm = norm(40, false);
      of.taps = norm(3 * of.qkv.n_out, false).weight, of.dt_bias = norm(6, false).weight, of.log_rate = norm(6, false).weight;
      stage.n_classes = 0, stage.n_state_classes = 1;
    }
    if (s.gated && s.experts) {
      MdiExperts& of = block.experts;
      for (MdiNorm* one : {&of.norm_router, &of.norm, &of.norm_behind, &of.norm_behind_shared}) *one = norm(72, false);
      of.scales = norm(5, false).weight;
    }
    for (int i = 0; i < kLength * attention.rope_n_elem; i++) {
      float a = random.number();
      cos.push_back(a), sin.push_back(1.0f - a * a);
    }
    attention.cos = cos.data(), attention.sin = sin.data();
    stage.blocks = &block, stage.n_blocks = 1, stage.n_embd = 72;
  }
  ~Stage() {
    for (Weight* w : weights) delete w;
    for (Floats* f : floats) delete f;
  }
  Stage(const Stage&) = delete;

  void make_latent(const Shape& s) {
    MdiAttention& attention = block.attention;
    MdiLatent& of = block.latent;
    of.kv_rank = 32, of.nope_size = 20, of.value_size = 12;
    attention.n_groups = 1, attention.head_size = 48, attention.rope_n_elem = 16, attention.rope_interleaved = true;
    attention.qkv = matrix(s, 48, 72), attention.proj = matrix(s, 72, 4 * 12);
    of.norm_q = norm(40, false), of.norm_kv = norm(32, false);
    of.q_a = matrix(s, 40, 72), of.q_b = matrix(s, 4 * (20 + 16), 40);
    for (int h = 0; h < 4; h++) {
      weights.push_back(new Weight(random, kBf16, 32, 20)), up_k.push_back(weights.back()->matrix);
      weights.push_back(new Weight(random, kBf16, 12, 32)), up_v.push_back(weights.back()->matrix);
    }
    of.up_k = up_k.data(), of.up_v = up_v.data();
    if (!s.experts) return;
    experts.push_back(mlp(s));
    weights.push_back(new Weight(random, kFloat32, 6, 72));
    block.experts.router = weights.back()->matrix, block.experts.experts = experts.data(), block.experts.n = 6;
    block.experts.correction = norm(6, false).weight;
    block.experts.n_groups = 3, block.experts.n_used_groups = 2, block.experts.n_scores = 2;
  }

  MdiNorm norm(int n, bool with_bias) {
    floats.push_back(new Floats(random.numbers(n, 0.5f, 1.0f)));
    const float* weight = floats.back()->data();
    if (with_bias) floats.push_back(new Floats(random.numbers(n)));
    return {weight, with_bias ? floats.back()->data() : nullptr, norm_type, unit_offset, 1e-5f, 0};
  }
  MdiMatrix matrix(const Shape& s, int n_out, int n_in) {
    weights.push_back(new Weight(random, s.format, n_out, n_in, s.layer_norm));
    return weights.back()->matrix;
  }
  MdiMlp mlp(const Shape& s) {
    MdiMlp m{matrix(s, 150, 72), {}, matrix(s, 72, 150), s.layer_norm ? kGelu : s.window ? kGeluTanh : kSilu, 0};
    if (!s.layer_norm) m.fc_2 = matrix(s, 150, 72);
    return m;
  }

  // Two sequences of kLength rows side by side, handed over in pieces of these lengths, the last one again and again. `bad` is
  // brought into one number of row kBadRow of the first one, unless it is zero. With `goes_back`, other rows come before each
  // piece, and are taken back.
  Floats run(const Context& context, const std::vector<int>& pieces, float bad = 0, bool goes_back = false) {
    int n_pages = (kLength + kPage - 1) / kPage, items[] = {4, 2, 2, 1};
    int numbers = block.latent.kv_rank ? block.attention.head_size : 20 + 32;
    int64_t slot = (int64_t)numbers * kPage * items[block.attention.cache_type] + (block.attention.cache_type == kCacheInt8 ? 2 * kPage * 4 : 0);
    int64_t page_bytes = 2 * ((slot + 63) / 64 * 64);
    uint8_t* pool = (uint8_t*)std::aligned_alloc(64, 2 * n_pages * page_bytes);
    std::memset(pool, 0xff, 2 * n_pages * page_bytes);  // numbers that would show
    std::vector<int32_t> pages[2];
    for (int p = 0; p < 2 * n_pages; p++) pages[p % 2].push_back((p + 3) % (2 * n_pages));
    const int32_t* tables[] = {pages[0].data(), pages[1].data()};
    int32_t first[] = {0, 0};
    Floats x = Random(4).numbers((size_t)2 * kLength * 72);
    if (bad != 0) x[(size_t)kBadRow * 72 + 3] = bad;
    const MdiDelta& net = block.delta;
    int64_t state = net.n_head * net.k_size * net.v_size, row = net.qkv.n_out + 2 * net.n_head;
    int64_t block_floats = 2 * state + (net.n_taps - 1 + kRoom) * row;
    Floats kept[2];
    int64_t places[2][2] = {{0, 0}, {0, 0}};
    MdiStates states[2];
    for (int s = 0; s < 2; s++) {
      if (net.n_head) kept[s].resize((size_t)block_floats);
      states[s] = {kept[s].data(), places[s], block_floats, 0};
    }
    size_t piece = 0;
    for (int at = 0; at < kLength; piece += piece + 1 < pieces.size()) {
      int n = pieces[piece] < kLength - at ? pieces[piece] : kLength - at;
      size_t n_floats = (size_t)n * 72, from[] = {(size_t)at * 72, (size_t)(kLength + at) * 72};
      Floats rows(2 * n_floats);
      for (int s = 0; s < 2; s++) std::memcpy(&rows[s * n_floats], &x[from[s]], n_floats * sizeof(float));
      MdiSlice slices[] = {{{0, 0}, at, n, 0}, {{1, 0}, at, n, 0}};
      Floats columns((size_t)2 * n * kColumns);
      for (size_t i = 0; i < columns.size(); i++) columns[i] = 0.01f * (float)(at + (int)(i / kColumns) % n + (int)(i % kColumns));
      for (MdiStates& one : states)
        if (at + n - one.first > kRoom / 2 && at > kKept) one.first = at - kKept;
      MdiFrame frame{rows.data(), slices, tables, first, &pool, &page_bytes, 2, 2 * n, columns.data(), kColumns, states};
      if (goes_back) {
        Floats others(rows.rbegin(), rows.rend());
        frame.rows = others.data();
        require(!mdi_forward(context.handle, &stage, &frame), "memory");
        frame.rows = rows.data();
      }
      require(!mdi_forward(context.handle, &stage, &frame), "memory");
      for (int s = 0; s < 2; s++) std::memcpy(&x[from[s]], &rows[s * n_floats], n_floats * sizeof(float));
      at += n;
    }
    std::free(pool);
    return x;
  }
};

static void try_block(const char* set, const Shape& shape) {
  Stage stage(shape);
  std::string name = std::string("block-") + shape.name;
  Context one(1), three(3);
  Floats whole = stage.run(one, {kLength});
  require(same(whole, stage.run(three, {35, 25, 1})), name + " depends on threads or how a prompt is cut");
  require(same(whole, stage.run(three, {5, 3, 1}, 0, true)), name + " depends on rows that were taken back");
  print(set, name, whole);
  for (float bad : kNotFinite) {
    Floats damaged = stage.run(three, {35, 25, 1}, bad);
    size_t first = (size_t)kBadRow * 72, end = 72 * (size_t)(stage.block.attention.window ? kBadRow + stage.block.attention.window : kLength);
    require(all_finite(&damaged[first], end - first, false), name + " hides a number that is not finite");
    require(!std::memcmp(damaged.data(), whole.data(), first * sizeof(float)) &&
                !std::memcmp(&damaged[end], &whole[end], (whole.size() - end) * sizeof(float)),
            name + " spreads a number that is not finite");
  }
}

int main(int argc, char** argv) {
  const Shape shapes[] = {
      {"float32", kFloat32, kCacheFloat32, false, false, false, false, false, false},
      {"bf16-parallel", kBf16, kCacheBf16, true, true, false, false, false, false},
      {"fp16-window", kFp16, kCacheFp16, false, false, false, false, true, false},
      {"int8-interleaved", kInt8, kCacheInt8, false, false, true, false, false, false},
      {"int4-experts", kInt4, kCacheFloat32, false, false, false, true, false, false},
      {"mxfp4-experts", kMxfp4, kCacheBf16, false, false, false, true, true, false},
      {"int8-window", kInt8, kCacheInt8, false, false, false, false, true, false},
      {"q4_k-experts", kQ4_k, kCacheBf16, false, false, false, true, false, false},
      {"q6_k-window", kQ6_k, kCacheInt8, false, false, false, false, true, false},
      {"float32-gated", kFloat32, kCacheFloat32, false, false, false, false, false, true},
      {"int4-experts-gated", kInt4, kCacheInt8, false, false, false, true, false, true},
      {"float32-latent", kFloat32, kCacheFloat32, false, false, false, false, false, false, true},
      {"bf16-latent", kBf16, kCacheFp16, false, false, false, true, false, false, true},
      {"int8-latent", kInt8, kCacheInt8, false, false, false, true, false, false, true},
      {"float32-delta", kFloat32, kCacheFloat32, false, false, false, false, false, false, false, true},
      {"int8-delta-in-turn", kInt8, kCacheFloat32, false, false, true, true, false, false, false, true},
      {"int4-experts-gates", kInt4, kCacheFloat32, false, false, false, true, false, true, false, true},
  };
  std::istringstream sets(mdi_instruction_sets());
  int left = argc > 1 ? std::atoi(argv[1]) : 100;
  for (std::string set; left-- > 0 && sets >> set;) {
    require(!mdi_force(set.c_str()), set + " cannot be forced");
    try_functions(set.c_str());
    try_packing(set.c_str());
    try_extremes(set.c_str());
    try_extreme_blocks(set.c_str());
    for (int format = kFloat32; format <= kIq4_xs; format++) {
      try_linear(set.c_str(), format, 16 * 5 + 5, 301);
      try_linear(set.c_str(), format, 7, 64);
    }
    for (const Shape& shape : shapes) try_block(set.c_str(), shape);
  }
}
