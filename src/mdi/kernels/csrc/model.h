// What Python tells the kernels of a model: plain structures, the same for all instruction sets (kernels/blocks.py has their twins).
#pragma once
#include <cstdint>

enum MdiFormat {  // of weights; layout.py says how they lie, from kQ8_0 on blocks.h
  kFloat32 = 0, kBf16 = 1, kFp16 = 2, kInt8 = 3, kInt4 = 4, kMxfp4 = 5,
  kQ8_0 = 6, kQ4_1 = 7, kQ5_0 = 8, kQ5_1 = 9, kQ4_k = 10, kQ5_k = 11, kQ6_k = 12, kIq4_nl = 13, kIq4_xs = 14
};
enum MdiCacheType { kCacheFloat32 = 0, kCacheBf16 = 1, kCacheFp16 = 2, kCacheInt8 = 3 };
enum MdiNormType { kRmsNorm = 0, kLayerNorm = 1 };
enum MdiActivation { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kClampedGlu = 4 };

// Pieces of a block that can be computed alone. The first two read the frame's rows and write y (n_rows, n_embd).
enum MdiPiece {
  kAttention = 0,
  kMlp = 1,
  kProject = 2,       // the frame's rows -> y (n_rows, n_out of qkv): queries, keys, values without norms and positions
  kAttend = 3,        // the frame's rows are what kProject gave, and are changed -> y (n_rows, n_embd)
};

struct MdiMatrix {
  const uint8_t* data;  // null: there is no such layer
  const float* bias;    // n_out floats, or null
  int32_t format, n_out, n_in;
  int32_t skip;         // of n_in, the first ones, which rows lack: a share of a weight that begins within a group
  const MdiMatrix* pieces;  // of rows, one below the other, if these are in different formats; each of them has none
  int32_t n_pieces;         // 0, or 2 to kMostPieces
  int32_t reserved;
};
constexpr int kMostPieces = 64;

struct MdiNorm {
  const float* weight;  // null: no norm
  const float* bias;    // or null
  int32_t type, unit_offset;  // unit_offset: it multiplies by 1 + weight
  float eps;
  int32_t reserved;
};

// One gated or plain MLP: act(fc_1 x) * (fc_2 x), or act(fc_1 x) where fc_2 is missing; then proj.
struct MdiMlp {
  MdiMatrix fc_1, fc_2, proj;
  int32_t activation;
  float limit;  // of kClampedGlu
};

// Heads of queries in groups, each of which shares keys and values.
struct MdiAttention {
  MdiNorm norm_q, norm_k, norm_v;
  MdiMatrix qkv, proj;
  MdiMatrix out_gate;         // what heads give is multiplied by the sigmoid of this layer; null: it is not
  const float* sinks;         // n_head scores of a key without a value, which a softmax over keys also counts; or null
  const float *cos, *sin;     // (max_length, rope_n_elem)
  const float* score_bias;    // (n_head, score_bias_floats): added to the scores of the keys at each position (ALiBi); or null
  int64_t score_bias_floats;  // of one head: whole pages of positions
  int32_t n_head, n_groups, head_size;
  int32_t n_keys, n_values;   // heads that qkv makes: n_groups each; no values: they are made of the keys; no keys: they are there
  int32_t queries_per_group;  // that share keys and values, on all nodes together
  int32_t first_head;         // place of the first head in its group, of which another node may have some
  int32_t norms_over_all;     // norms of queries and keys go over all heads together (OLMo 2)
  int32_t rope_n_elem, rope_interleaved;
  int32_t window;             // positions that a row sees, itself included; 0 is all
  int32_t cache_type;
  int32_t cache_class;        // which of the tables of a sequence
  int32_t cache_layer;        // number of the block within its class
  float scale, softcap;       // softcap 0: none
};

// Latent attention: keys and values of all heads come from one row of kv_rank numbers, which lies in the caches with the key that
// all heads rotate. MdiAttention has what it has in common with others: one group of keys of kv_rank + rope_n_elem numbers, which
// qkv makes.
struct MdiLatent {
  MdiNorm norm_q, norm_kv;
  MdiMatrix q_a, q_b;            // without q_a, q_b reads what qkv reads
  const MdiMatrix *up_k, *up_v;  // of each head, in floats: nope_size numbers -> kv_rank, and kv_rank -> value_size
  int32_t kv_rank;               // 0: the block has other attention
  int32_t nope_size, value_size, reserved;
};

// A gated delta net in place of attention (delta.h).
struct MdiDelta {
  MdiMatrix qkv, out_gate, gates, proj;  // gates: of each head b, then of each a
  MdiNorm norm;               // of what a head gives
  const float* taps;          // (n_taps, channels)
  const float *dt_bias, *log_rate;  // (n_head) each
  int32_t n_head, n_groups;   // n_head 0: the block has none
  int32_t k_size, v_size, n_taps;
  int32_t is_in_turn;         // a key serves every n_groups-th head, and not those that follow each other
  int32_t cache_class;        // number among the classes of states
  int32_t cache_layer;        // number of the block within its class
  float scale;                // of queries
  int32_t reserved;
};

struct MdiExperts {
  MdiMatrix router;         // float32; null without experts
  MdiNorm norm_router, norm, norm_behind, norm_behind_shared;  // with these, experts and router read rows without norm_2
  const float* correction;  // n floats: the router is one of sigmoids; null: of a softmax
  const float* scales;      // n factors of the experts' weights, or null
  const MdiMlp* experts;    // n of them
  MdiMatrix shared_gate;    // one output, whose sigmoid the shared expert is multiplied with; null: it is not
  int32_t n, n_used;
  int32_t n_groups, n_used_groups, n_scores;  // only those groups are used whose largest n_scores sums add up to most; one is none
  float scale;
};

// What a block adds behind its MLP: norm(proj(act(gate x) * column)).
struct MdiGated {
  MdiMatrix gate, proj;  // null: nothing
  MdiNorm norm;
  int32_t activation;
  int32_t at;  // of the column, in a row of the frame's columns
};

enum MdiResidual { kSequential = 0, kParallel = 1, kBehind = 2 };  // kBehind: norms follow the sums of both with what they read

struct MdiBlock {
  MdiNorm norm_1, post_attention_norm, norm_2, post_mlp_norm;
  MdiAttention attention;
  MdiLatent latent;
  MdiDelta delta;
  MdiMlp mlp;  // also the shared expert, where there are experts
  MdiExperts experts;
  MdiGated gated;
  const float* scalar;  // that its outputs are multiplied with, or null
  int32_t residual, norm_is_shared;  // norm_is_shared: the MLP reads what norm_1 gives, too
};

// Layers of a block to whose results an adapter may add something.
enum MdiLayer { kQkv = 0, kAttentionProj = 1, kFc1 = 2, kFc2 = 3, kProj = 4 };
constexpr int kMostRank = 256;

// A part of an adapter: results [first, first + n_out) of a layer += B (A x), where x is what the layer reads.
struct MdiLowRank {
  const float* a;  // (rank, n_in)
  const float* b;  // (rank, n_out), with the adapter's scale
  int32_t adapter;  // its number, from 1 on
  int32_t layer, rank, n_in, first, n_out;
};

// A run of blocks.
struct MdiStage {
  const MdiBlock* blocks;
  int32_t n_blocks, n_classes, n_embd;
  int32_t n_state_classes;  // of blocks with states, besides n_classes
  int64_t* n_finished;  // counts the blocks that `forward` has finished, for other threads; may be null
  const MdiLowRank* low_rank;        // of all blocks, one after the other; null: there are no adapters
  const int32_t* low_rank_of_block;  // those of block b are [low_rank_of_block[b], low_rank_of_block[b + 1])
};

// Rows of one sequence: positions start, start + 1, ... The record that frames carry on the wire (kernels/slices.py), 4-byte aligned.
struct MdiSlice {
  uint32_t seq_id[2];  // the low half first; the upper 16 bits of all are the number of the sequence's adapter, 0 for none
  int32_t start, n_rows, n_logits;
};

// The states of one sequence in the blocks of a class, see delta.h.
struct MdiStates {
  float* numbers;       // (blocks, block_floats)
  int64_t* places;      // (blocks, 2)
  int64_t block_floats;
  int64_t first;        // rows before this position are final
};

struct MdiFrame {
  float* rows;  // (n_rows, n_embd), changed in place
  const MdiSlice* slices;
  const int32_t* const* pages;  // numbers of pages, per slice and cache class
  const int32_t* first;         // which 32 positions the first page has, per slice and class
  uint8_t* const* pool;         // base of the pages, per class
  const int64_t* page_bytes;    // per class
  int32_t n_slices, n_rows;
  const float* columns;  // (n_rows, n_columns), besides rows; or null
  int64_t n_columns;
  const MdiStates* states;  // per slice and class of states
};
