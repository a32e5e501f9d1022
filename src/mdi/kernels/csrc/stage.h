// A run of blocks over the rows of a frame, in two halves a block: attention and MLP.
#pragma once
#include "functions.h"
#include "rows.h"
#include "matmul.h"
#include "norm.h"
#include "rotary.h"
#include "attention.h"
#include "latent.h"
#include "adapters.h"

namespace MDI_NS {
constexpr int kMostThreads = 256;
}

#include "delta.h"

namespace MDI_NS {

// Memory of a stage that every frame uses again. Grows with the largest frame.
struct Scratch {
  struct PerThread {
    Buffer<float> q, weights, most, total, result, value;
    Buffer<const float*> bias;
    Buffer<int32_t> position;
  };
  Buffer<float> normed, heads, attended, out_gate, gate, up, result, chosen, expert, shifted;
  Buffer<float> router, corrected, of_groups, probability;
  Buffer<float> low, queries, absorbed, latents;
  Buffer<int32_t> choice, adapter, taken;
  const float* read_by_experts = nullptr;  // rows, in `normed` or the frame's
  Buffer<float> floats;
  ByteRows bytes;
  DeltaScratch delta;
  PerThread threads[kMostThreads];
};

class Runner {
 public:
  Runner(const MdiStage& stage, const MdiFrame& frame, Team& team, Scratch& scratch)
      : stage_(stage), frame_(frame), team_(team), scratch_(scratch), n_(frame.n_rows) {}

  void forward() {
    for (int b = 0; b < stage_.n_blocks; b++) {
      for (int half = 0; half < 2; half++) step(b, half);
      if (auto* n = stage_.n_finished) __atomic_fetch_add(n, 1, __ATOMIC_RELAXED);
    }
  }

  // One half of a block, 0 attention or 1 the MLP, and what it adds to the frame's rows. Where both read the same rows, what
  // attention adds is kept until the MLP has read them.
  void step(int b, int half) {
    const MdiBlock& block = stage_.blocks[b];
    if (half == 0) {
      float* y = scratch_.result.of(2 * (size_t)n_ * stage_.n_embd);
      attention_half(block, frame_.rows, y);
      if (block.residual != kParallel) add_normed(block, block.post_attention_norm, y);
      return;
    }
    mlp_half(block, frame_.rows, of_mlp(block));
    end_step(block);
  }

  // The second half of a block with experts in calls of its own, to the same bits: first all but the experts. What each row has
  // chosen, (n, n_used) numbers of experts, is copied to `choice`.
  void route(int b, int32_t* choice) {
    const MdiBlock& block = stage_.blocks[b];
    choose_experts(block, frame_.rows, normalized_for_mlp(block, frame_.rows), of_mlp(block));
    std::memcpy(choice, scratch_.choice.data(), sizeof(int32_t) * (size_t)n_ * block.experts.n_used);
  }

  // Then the experts [first, end), in rising order over all calls; the last ones end the half.
  void some_experts(int b, int first, int end) {
    const MdiBlock& block = stage_.blocks[b];
    add_experts(block, first, end);
    if (end < block.experts.n) return;
    join_experts(block, of_mlp(block));
    end_step(block);
  }

  // What a block does behind its MLP.
  void finish(const MdiBlock& block) {
    const MdiGated& of = block.gated;
    int width = stage_.n_embd, n_gated = of.gate.n_out;
    if (of.gate.data) {
      float *gate = scratch_.gate.of((size_t)n_ * n_gated), *y = scratch_.result.of((size_t)n_ * width);
      multiply(of.gate, frame_.rows, n_, gate);
      team_.run_rows(n_, [&](int m, int) {
        float* g = gate + (int64_t)m * n_gated;
        const float* column = frame_.columns + m * frame_.n_columns + of.at;
        for (int i = 0; i < n_gated; i += 16) {
          F a = activate(load_part(g + i, n_gated - i), of.activation);
          store_part(g + i, mul(a, load_part(column + i, n_gated - i)), n_gated - i);
        }
      });
      multiply(of.proj, gate, n_, y);
      add_normed(block, of.norm, y);
    }
    if (block.scalar)
      for (int64_t i = 0; i < (int64_t)n_ * width; i++) frame_.rows[i] *= *block.scalar;
  }

  // The phases [at, stop) of blocks of which this node has a share: six for each, the order is kPhases. Where one sum does for
  // both halves, y has both, and the last two phases are empty.
  void run_phases(float* y, float* z, MdiMesh* mesh, int32_t& at, int stop) {
    for (; at < stop; at++) {
      int b = at / kPhasesEach, which = at % kPhasesEach;
      if (!phase(b, kPhases[stage_.blocks[b].residual == kParallel][which], y, z, mesh)) return;
      if (auto* n = stage_.n_finished; n && which == kPhasesEach - 1) __atomic_fetch_add(n, 1, __ATOMIC_RELAXED);
    }
  }

  // x (n, n_embd) -> y: what attention makes of the normed rows, before the norm that may follow it.
  void attention_half(const MdiBlock& block, const float* x, float* y) {
    if (block.latent.kv_rank) return latent_half(block, x, y);
    if (block.delta.n_head) return delta_half(block, x, y);
    const MdiAttention& of = block.attention;
    float* heads = scratch_.heads.of((size_t)n_ * of.qkv.n_out);
    float* gate = of.out_gate.data ? scratch_.out_gate.of((size_t)n_ * of.out_gate.n_out) : nullptr;
    project(block, x, heads, gate);
    attend_heads(block, heads, y, gate);
  }

  // The same of a block with a gated delta net.
  void delta_half(const MdiBlock& block, const float* x, float* y) {
    const MdiDelta& of = block.delta;
    int size = of.v_size, wide = of.n_head * size;
    float* qkv = scratch_.heads.of((size_t)n_ * of.qkv.n_out);
    float* out_gate = scratch_.out_gate.of((size_t)n_ * wide);
    float* gates = scratch_.router.of((size_t)n_ * of.gates.n_out);
    float* given = scratch_.attended.of((size_t)n_ * wide);
    const float* normed = normalized(block.norm_1, x);
    Products products;
    products.add(of.qkv, qkv), products.add(of.out_gate, out_gate), products.add(of.gates, gates);
    multiply(products, normed, n_);
    adapt(block, kQkv, normed, qkv, of.qkv.n_out);
    adapt(block, kOutGate, normed, out_gate, wide);
    adapt(block, kGates, normed, gates, of.gates.n_out);
    DeltaStates(of, stage_, frame_, team_, scratch_.delta).take_in(qkv, gates, given);
    team_.run_rows(n_, [&](int m, int) {
      for (int h = 0; h < of.n_head; h++) {
        float* head = given + (int64_t)m * wide + h * size;
        normalize(of.norm, head, size, head);
        for (int i = 0; i < size; i += 16) {
          F z = load_part(out_gate + (int64_t)m * wide + h * size + i, size - i);
          store_part(head + i, mul(load_part(head + i, size - i), activate(z, kSilu)), size - i);
        }
      }
    });
    multiply(of.proj, given, n_, y);
    adapt(block, kAttentionProj, given, y, stage_.n_embd);
  }

  // x (n, n_embd) -> heads (n, queries, keys and values), without norms and positions; gate: of what heads give, or null.
  void project(const MdiBlock& block, const float* x, float* heads, float* gate = nullptr) {
    const float* normed = normalized(block.norm_1, x);
    Products products;
    products.add(block.attention.qkv, heads);
    if (gate) products.add(block.attention.out_gate, gate);
    multiply(products, normed, n_);
    adapt(block, kQkv, normed, heads, block.attention.qkv.n_out);
    if (gate) adapt(block, kOutGate, normed, gate, block.attention.out_gate.n_out);
  }

  // The same of latent attention. What makes keys and values of all heads is absorbed: queries are multiplied by the first half
  // of it, results by the second (DeepSeek-V2, section 2.1.2).
  void latent_half(const MdiBlock& block, const float* x, float* y) {
    const MdiAttention& of = block.attention;
    const MdiLatent& own = block.latent;
    int n_head = of.n_head, size = of.head_size, nope = own.nope_size, wide = own.q_b.n_out;
    const float* normed = normalized(block.norm_1, x);
    float *rows = scratch_.heads.of((size_t)n_ * size), *queries = scratch_.queries.of((size_t)n_ * wide);
    float* low = own.q_a.data ? scratch_.low.of((size_t)n_ * own.q_a.n_out) : nullptr;
    Products products;
    products.add(of.qkv, rows);
    products.add(low ? own.q_a : own.q_b, low ? low : queries);
    multiply(products, normed, n_);
    if (low) {
      int width = own.q_a.n_out;
      team_.run_rows(n_, [&](int m, int) { normalize(own.norm_q, low + (int64_t)m * width, width, low + (int64_t)m * width); });
      multiply(own.q_b, low, n_, queries);
    }
    float* absorbed = scratch_.absorbed.of((size_t)n_ * n_head * size);
    of_heads(own.up_k, n_head, queries, wide, nope + of.rope_n_elem, absorbed, n_head * size, size);
    place_latents(block, rows, queries, absorbed);
    float* latents = scratch_.latents.of((size_t)n_ * n_head * own.kv_rank);
    attend_latent_slices(block, absorbed, latents);
    int values = n_head * own.value_size;
    float* attended = scratch_.attended.of((size_t)n_ * values);
    of_heads(own.up_v, n_head, latents, n_head * own.kv_rank, own.kv_rank, attended, values, own.value_size);
    multiply(of.proj, attended, n_, y);
    adapt(block, kAttentionProj, attended, y, stage_.n_embd);
  }

  // heads as `project` gives them, changed in place, and gate -> y (n, n_embd).
  void attend_heads(const MdiBlock& block, float* heads, float* y, const float* gate = nullptr) {
    const MdiAttention& of = block.attention;
    int width = of.qkv.n_out, wide = of.n_head * of.head_size;
    prepare_heads(of, heads, width);
    float* attended = scratch_.attended.of((size_t)n_ * wide);
    attend_slices(of, heads, width, attended, wide);
    if (gate) open_gates(gate, attended, wide, wide);
    multiply(of.proj, attended, n_, y);
    adapt(block, kAttentionProj, attended, y, stage_.n_embd);
  }

  // x (n, n_embd) -> y: what the MLP, or the chosen experts, make of the normed rows.
  void mlp_half(const MdiBlock& block, const float* x, float* y) {
    const float* normed = normalized_for_mlp(block, x);
    if (!block.experts.n) return mlp(block.mlp, normed, n_, y, &block);
    choose_experts(block, x, normed, y);
    add_experts(block, 0, block.experts.n);
    join_experts(block, y);
  }

  // rows += norm(y), or rows = norm(rows + y); rows is the frame's.
  void add_normed(const MdiBlock& block, const MdiNorm& norm, float* y) {
    int width = stage_.n_embd;
    team_.run_rows(n_, [&](int m, int) {
      float* row = y + (int64_t)m * width;
      bool after = block.residual == kBehind;
      if (norm.weight && !after) normalize(norm, row, width, row);
      float* to = frame_.rows + (int64_t)m * width;
      for (int i = 0; i < width; i++) to[i] = row[i] + to[i];
      if (norm.weight && after) normalize(norm, to, width, to);
    });
  }

  // Rows (n, n_in) times a packed weight -> (n, n_out).
  void multiply(const MdiMatrix& w, const float* x, int n, float* y) {
    Products products;
    products.add(w, y);
    multiply(products, x, n);
  }

 private:
  static constexpr int kPhasesEach = 6;
  enum Phase { kAttentionShare, kMlpShare, kSumAttention, kAddAttention, kSumMlp, kAddMlp };
  static constexpr Phase kPhases[2][kPhasesEach] = {
      {kAttentionShare, kSumAttention, kAddAttention, kMlpShare, kSumMlp, kAddMlp},
      {kAttentionShare, kMlpShare, kSumAttention, kAddAttention, kSumMlp, kAddMlp}};  // both read the same rows

  // False if a sum is due that `mesh` cannot do.
  bool phase(int b, Phase what, float* y, float* z, MdiMesh* mesh) {
    const MdiBlock& block = stage_.blocks[b];
    int64_t n_floats = (int64_t)n_ * stage_.n_embd;
    bool parallel = block.residual == kParallel;
    bool is_one_sum = parallel && !block.post_attention_norm.weight && !block.post_mlp_norm.weight;
    const uint8_t* next_block = b + 1 < stage_.n_blocks ? stage_.blocks[b + 1].attention.qkv.data : nullptr;
    switch (what) {
      case kAttentionShare:
        if (block.attention.n_head || block.delta.n_head) attention_half(block, frame_.rows, y);
        else std::memset(y, 0, sizeof(float) * (size_t)n_floats);
        return true;
      case kMlpShare:
        if (has_mlp(block)) mlp_half(block, frame_.rows, z);
        else std::memset(z, 0, sizeof(float) * (size_t)n_floats);
        if (is_one_sum)
          for (int64_t i = 0; i < n_floats; i++) y[i] += z[i];
        return true;
      case kSumAttention:
        return mesh && exchange(*mesh, y, n_floats, parallel ? next_block : block.mlp.fc_1.data);
      case kAddAttention:
        add_normed(block, block.post_attention_norm, y);
        return true;
      case kSumMlp:
        return is_one_sum || (mesh && exchange(*mesh, z, n_floats, next_block));
      default:
        if (!is_one_sum) add_normed(block, block.post_mlp_norm, z);
        finish(block);
        return true;
    }
  }

  // Whether this node has columns of the MLP, or of the experts.
  static bool has_mlp(const MdiBlock& block) {
    return block.mlp.fc_1.n_out > 0 || (block.experts.n && block.experts.experts[0].fc_1.n_out > 0);
  }

  // Weights in one format each that read the same rows, and where their results go.
  struct Products {
    static constexpr int kMostProducts = 3 * kMostPieces;
    struct One {
      const MdiMatrix* w;
      Out out;
    };
    One all[kMostProducts];
    int n = 0;

    void add(const MdiMatrix& w, float* y) {
      if (!w.n_pieces) all[n++] = {&w, {y, w.n_out}};
      for (int i = 0; i < w.n_pieces; y += w.pieces[i++].n_out) all[n++] = {&w.pieces[i], {y, w.n_out}};
    }
  };

  // Those that take the rows in the same form are computed in one round of the team.
  void multiply(const Products& products, const float* x, int n) {
    const Products::One* all = products.all;
    for (int at = 0, end; at < products.n; at = end) {
      Rows rows = prepared(*all[at].w, x, n);
      int first[Products::kMostProducts], total = 0;
      for (end = at; end < products.n && read_the_same(*all[at].w, *all[end].w); end++) {
        first[end - at] = total;
        total += n_pieces(*all[end].w);
      }
      team_.run(total, [&](int piece, int) {
        int i = end - at - 1;
        while (piece < first[i]) i--;
        multiply_piece(*all[at + i].w, piece - first[i], rows, all[at + i].out);
      });
    }
  }

  Rows prepared(const MdiMatrix& w, const float* x, int n) {
    if (w.skip) x = shifted(w, x, n);
    if (wants_bytes(w)) {
      ByteRows& bytes = scratch_.bytes;
      bytes.reserve(n, w.n_in, tile_rows(w.format));
      team_.run_rows(n, [&](int m, int) { quantize_row(x + (int64_t)m * w.n_in, m, bytes); });
      return {n, nullptr, &bytes};
    }
    if (n == 1) return {n, x, nullptr};
    int tile = tile_rows(w.format);
    float* floats = scratch_.floats.of((size_t)n * w.n_in);
    team_.run_rows(n, [&](int m, int) { interleave_row(x + (int64_t)m * w.n_in, m, n, w.n_in, tile, floats); });
    return {n, floats, nullptr};
  }

  // Rows (n, n_in - skip) behind `skip` zeros.
  const float* shifted(const MdiMatrix& w, const float* x, int n) {
    float* y = scratch_.shifted.of((size_t)n * w.n_in);
    size_t there = (size_t)(w.n_in - w.skip);
    for (int m = 0; m < n; m++) {
      float* row = y + (int64_t)m * w.n_in;
      std::memset(row, 0, sizeof(float) * (size_t)w.skip);
      std::memcpy(row + w.skip, x + (int64_t)m * there, sizeof(float) * there);
    }
    return y;
  }

  // The panels of a weight are cut into pieces for the team: at least four panels each, what a single row wants at once.
  static int n_panels(const MdiMatrix& w) { return padded(w.n_out, kPanel) / kPanel; }

  int panels_each(const MdiMatrix& w) const {
    int each = n_panels(w) / (team_.size() == 1 ? 1 : 8 * team_.size()) / 4 * 4;
    return each < 4 ? 4 : each;
  }

  int n_pieces(const MdiMatrix& w) const { return team_.size() == 1 ? 1 : (n_panels(w) + panels_each(w) - 1) / panels_each(w); }

  void multiply_piece(const MdiMatrix& w, int piece, const Rows& rows, const Out& out) const {
    int first = piece * panels_each(w), last = first + panels_each(w);
    if (team_.size() == 1 || last > n_panels(w)) last = n_panels(w);
    multiply_panels(w, first, last, rows, out);
  }

  // y (n, width) of a layer += what the adapters of the rows add; x (n, n_in) is what the layer has read.
  void adapt(const MdiBlock& block, int layer, const float* x, float* y, int width) {
    if (!stage_.low_rank) return;
    int b = (int)(&block - stage_.blocks), first = stage_.low_rank_of_block[b], end = stage_.low_rank_of_block[b + 1];
    int32_t* adapter = scratch_.adapter.of((size_t)n_);
    bool has_some = false;
    for (int s = 0, m = 0; s < frame_.n_slices; s++)
      for (int r = 0; r < frame_.slices[s].n_rows; r++, m++) {
        adapter[m] = adapter_of(frame_.slices[s]);
        has_some = has_some || adapter[m];
      }
    if (!has_some) return;
    team_.run(n_, [&](int m, int) {
      for (int i = first; i < end; i++) {
        const MdiLowRank& part = stage_.low_rank[i];
        if (part.adapter == adapter[m] && part.layer == layer)
          add_low_rank(part, x + (int64_t)m * part.n_in, y + (int64_t)m * width + part.first);
      }
    });
  }

  // y (n, width) *= sigmoid of gate (n, n_gates): each of its own, or all of a row by one. Not finite where the gate is not.
  void open_gates(const float* gate, float* y, int width, int n_gates) {
    team_.run_rows(n_, [&](int m, int) {
      float* row = y + (int64_t)m * width;
      for (int i = 0; i < width; i += 16) {
        F g = n_gates == 1 ? splat(gate[m]) : load_part(gate + (int64_t)m * width + i, width - i);
        store_part(row + i, mul(load_part(row + i, width - i), add(sigmoid(g), sub(g, g))), width - i);
      }
    });
  }

  const float* normalized(const MdiNorm& norm, const float* x) {
    if (!norm.weight) return x;
    int width = stage_.n_embd;
    float* y = scratch_.normed.of((size_t)n_ * width);
    team_.run_rows(n_, [&](int m, int) { normalize(norm, x + (int64_t)m * width, width, y + (int64_t)m * width); });
    return y;
  }

  void normalize_rows(const MdiNorm& norm, float* y) {
    int width = stage_.n_embd;
    team_.run_rows(n_, [&](int m, int) { normalize(norm, y + (int64_t)m * width, width, y + (int64_t)m * width); });
  }

  // Norms and positions of queries and keys; keys and values go to their pages.
  void prepare_heads(const MdiAttention& of, float* heads, int width) {
    int size = of.head_size, n_head = of.n_head, n_groups = of.n_groups;
    int row0 = 0;
    for (int s = 0; s < frame_.n_slices; row0 += frame_.slices[s].n_rows, s++) {
      const MdiSlice& slice = frame_.slices[s];
      team_.run_rows(slice.n_rows, [&](int r, int thread) {
        float* row = heads + (int64_t)(row0 + r) * width;
        int position = slice.start + r;
        if (of.norm_q.weight && of.norms_over_all) {
          normalize(of.norm_q, row, n_head * size, row);
          normalize(of.norm_k, row + n_head * size, n_groups * size, row + n_head * size);
        }
        float* values = row + (n_head + of.n_keys) * size;
        if (of.n_values < of.n_keys) {
          values = scratch_.threads[thread].value.of((size_t)of.n_keys * size);
          std::memcpy(values, row + n_head * size, sizeof(float) * (size_t)of.n_keys * size);
        }
        for (int h = 0; h < n_head + of.n_keys; h++) {
          float* head = row + h * size;
          const MdiNorm& norm = h < n_head ? of.norm_q : of.norm_k;
          if (norm.weight && !of.norms_over_all) normalize(norm, head, size, head);
          int64_t at = (int64_t)position * of.rope_n_elem;
          rotate(head, of.cos + at, of.sin + at, of.rope_n_elem, of.rope_interleaved);
        }
        for (int g = 0; g < of.n_keys; g++) {
          float* value = values + g * size;
          if (of.norm_v.weight) normalize(of.norm_v, value, size, value);
          append(of, page_of(of, slice, position / kPage, g), position % kPage, row + (n_head + g) * size, value);
        }
      });
    }
  }

  PageView page_of(const MdiAttention& of, const MdiSlice& slice, int page, int group) const {
    return view(of, page_bytes_of(of, slice, page), of.cache_layer, group);
  }

  // A matrix of each head in floats: head h of row m begins at x + m * width + h * size, its results at y + m * wide + h * each.
  void of_heads(const MdiMatrix* w, int n_head, const float* x, int width, int size, float* y, int wide, int each) {
    team_.run(n_head, [&](int h, int thread) {
      int n_in = w[h].n_in, tile = tile_rows(w[h].format);
      const float* from = x + (int64_t)h * size;
      float* floats = scratch_.threads[thread].value.of((size_t)n_ * n_in);
      for (int m = 0; n_ > 1 && m < n_; m++) interleave_row(from + (int64_t)m * width, m, n_, n_in, tile, floats);
      multiply_panels(w[h], 0, n_panels(w[h]), {n_, n_ > 1 ? floats : from, nullptr}, {y + (int64_t)h * each, wide});
    });
  }

  // Norms and positions of latent rows, which go to their pages, and what is rotated of queries, which goes behind the absorbed.
  void place_latents(const MdiBlock& block, float* rows, const float* queries, float* absorbed) {
    const MdiAttention& of = block.attention;
    const MdiLatent& own = block.latent;
    int size = of.head_size, rope = of.rope_n_elem, row0 = 0;
    for (int s = 0; s < frame_.n_slices; row0 += frame_.slices[s].n_rows, s++) {
      const MdiSlice& slice = frame_.slices[s];
      team_.run_rows(slice.n_rows, [&](int r, int) {
        int position = slice.start + r;
        int64_t m = row0 + r, at = (int64_t)position * rope;
        float* row = rows + m * size;
        normalize(own.norm_kv, row, own.kv_rank, row);
        rotate(row + own.kv_rank, of.cos + at, of.sin + at, rope, of.rope_interleaved);
        append_latent(of, own.kv_rank, latent_page(of, slice, position / kPage), position % kPage, row);
        for (int h = 0; h < of.n_head; h++) {
          float* to = absorbed + (m * of.n_head + h) * size + own.kv_rank;
          std::memcpy(to, queries + m * own.q_b.n_out + h * (own.nope_size + rope) + own.nope_size, sizeof(float) * (size_t)rope);
          rotate(to, of.cos + at, of.sin + at, rope, of.rope_interleaved);
        }
      });
    }
  }

  uint8_t* page_bytes_of(const MdiAttention& of, const MdiSlice& slice, int page) const {
    int c = of.cache_class;
    int64_t at = (&slice - frame_.slices) * stage_.n_classes + c;
    int64_t number = frame_.pages[at][page - frame_.first[at]];
    return frame_.pool[c] + number * frame_.page_bytes[c];
  }

  PageView latent_page(const MdiAttention& of, const MdiSlice& slice, int page) const {
    return latent_view(of, page_bytes_of(of, slice, page), of.cache_layer);
  }

  // absorbed (n, n_head, head_size) -> latents (n, n_head, kv_rank). A task takes a few heads of a few rows through all pages.
  void attend_latent_slices(const MdiBlock& block, const float* absorbed, float* latents) {
    int row0 = 0, n_parts = (block.attention.n_head + kQueries - 1) / kQueries;
    for (int s = 0; s < frame_.n_slices;) {
      int end = s;
      while (end < frame_.n_slices && frame_.slices[end].n_rows == 1) end++;
      if (end > s) {
        team_.run((end - s) * n_parts, [&](int task, int thread) {
          int i = task / n_parts;
          attend_latent_rows(block, frame_.slices[s + i], 0, 1, row0 + i, task % n_parts, absorbed, latents, thread);
        });
        row0 += end - s, s = end;
        continue;
      }
      const MdiSlice& slice = frame_.slices[s++];
      team_.run((slice.n_rows + kRowBlock - 1) / kRowBlock * n_parts, [&](int task, int thread) {
        int first = task / n_parts * kRowBlock, rest = slice.n_rows - first;
        int n = rest < kRowBlock ? rest : kRowBlock;
        attend_latent_rows(block, slice, first, n, row0 + first, task % n_parts, absorbed, latents, thread);
      });
      row0 += slice.n_rows;
    }
  }

  // Rows [first, first + n) of a slice, which are rows row0, ... of the frame, of kQueries heads.
  void attend_latent_rows(const MdiBlock& block, const MdiSlice& slice, int first, int n, int row0, int part, const float* absorbed,
                          float* latents, int thread) {
    const MdiAttention& of = block.attention;
    int kv_rank = block.latent.kv_rank, first_head = part * kQueries, rest = of.n_head - first_head;
    int k = rest < kQueries ? rest : kQueries;
    Scratch::PerThread& own = scratch_.threads[thread];
    int32_t* position = own.position.of((size_t)n * k);
    float *weights = own.weights.of((size_t)k * kPage), *most = own.most.of((size_t)n * k), *total = own.total.of((size_t)n * k);
    auto result = [&](int r) { return latents + ((int64_t)(row0 + r) * of.n_head + first_head) * kv_rank; };
    for (int i = 0; i < n * k; i++)
      position[i] = slice.start + first + i / k, most[i] = -__builtin_inff(), total[i] = 0;
    for (int r = 0; r < n; r++) std::memset(result(r), 0, sizeof(float) * (size_t)k * kv_rank);
    int lowest = position[0] - of.window + 1, highest = position[n * k - 1];
    for (int p = of.window && lowest > 0 ? lowest / kPage : 0; p <= highest / kPage; p++) {
      PageView page = latent_page(of, slice, p);
      for (int r = 0; r < n; r++) {
        Range seen = visible(position[r * k], p * kPage, of.window);
        if (seen.first >= seen.end) continue;
        Queries queries{nullptr, position + r * k, nullptr, weights, most + r * k, total + r * k, result(r), k};
        const float* q = absorbed + ((int64_t)(row0 + r) * of.n_head + first_head) * of.head_size;
        switch (of.cache_type) {
          case kCacheFloat32: attend_latents<kCacheFloat32, kQueries>(of, kv_rank, page, p * kPage, q, queries, 0); break;
          case kCacheBf16: attend_latents<kCacheBf16, kQueries>(of, kv_rank, page, p * kPage, q, queries, 0); break;
          case kCacheFp16: attend_latents<kCacheFp16, kQueries>(of, kv_rank, page, p * kPage, q, queries, 0); break;
          default: attend_latents<kCacheInt8, kQueries>(of, kv_rank, page, p * kPage, q, queries, 0);
        }
      }
    }
    for (int i = 0; i < n * k; i++) {
      F inverse = splat(1.0f / total[i]);
      float* to = result(i / k) + (int64_t)(i % k) * kv_rank;
      for (int d = 0; d < kv_rank; d += 16) store(to + d, mul(load(to + d), inverse));
    }
  }

  void attend_slices(const MdiAttention& of, const float* heads, int width, float* attended, int wide) {
    int row0 = 0, n_groups = of.n_groups;
    for (int s = 0; s < frame_.n_slices;) {
      // Slices of one row each, side by side, are the tasks of one round; a longer one is cut into blocks of rows.
      int end = s;
      while (end < frame_.n_slices && frame_.slices[end].n_rows == 1) end++;
      if (end > s) {
        team_.run((end - s) * n_groups, [&](int task, int thread) {
          const MdiSlice& slice = frame_.slices[s + task / n_groups];
          attend_rows(of, slice, 0, 1, row0 + task / n_groups, task % n_groups, heads, width, attended, wide, thread);
        });
        row0 += end - s, s = end;
        continue;
      }
      const MdiSlice& slice = frame_.slices[s++];
      int n_blocks = (slice.n_rows + kRowBlock - 1) / kRowBlock;
      team_.run(n_blocks * n_groups, [&](int task, int thread) {
        int first = task / n_groups * kRowBlock;
        int n = slice.n_rows - first < kRowBlock ? slice.n_rows - first : kRowBlock;
        attend_rows(of, slice, first, n, row0 + first, task % n_groups, heads, width, attended, wide, thread);
      });
      row0 += slice.n_rows;
    }
  }

  // Rows [first, first + n) of a slice, which are rows row0, ... of the frame, in one group of heads.
  void attend_rows(const MdiAttention& of, const MdiSlice& slice, int first, int n, int row0, int group, const float* heads,
                   int width, float* attended, int wide, int thread) {
    int size = of.head_size, padded_size = padded(size, 16);
    int first_head = group * of.queries_per_group - of.first_head, end = first_head + of.queries_per_group;
    if (first_head < 0) first_head = 0;
    if (end > of.n_head) end = of.n_head;
    int repeat = end - first_head, n_queries = n * repeat;
    Scratch::PerThread& own = scratch_.threads[thread];
    const float** bias = of.score_bias ? own.bias.of((size_t)n_queries) : nullptr;
    Queries queries{own.q.of((size_t)n_queries * size), own.position.of((size_t)n_queries), bias,
                    own.weights.of((size_t)n_queries * kPage), own.most.of((size_t)n_queries),
                    own.total.of((size_t)n_queries), own.result.of((size_t)n_queries * padded_size), n_queries};
    for (int i = 0; i < n_queries; i++) {
      own.position.data()[i] = slice.start + first + i / repeat;
      queries.most[i] = of.sinks ? of.sinks[first_head + i % repeat] : -__builtin_inff();
      queries.total[i] = of.sinks ? 1.0f : 0.0f;
      if (bias) bias[i] = of.score_bias + (first_head + i % repeat) * of.score_bias_floats;
    }
    for (int at = 0, k; at < n_queries; at += k) {
      k = together(at, n_queries);
      for (int i = 0; i < k; i++) {
        const float* head = heads + (int64_t)(row0 + (at + i) / repeat) * width + (first_head + (at + i) % repeat) * size;
        for (int d = 0; d < size; d++) own.q.data()[at * size + d * k + i] = head[d];
      }
    }
    auto page_at = [&](int p) { return page_of(of, slice, p, group); };
    switch (of.cache_type) {
      case kCacheFloat32: attend<kCacheFloat32>(of, of.window, queries, page_at); break;
      case kCacheBf16: attend<kCacheBf16>(of, of.window, queries, page_at); break;
      case kCacheFp16: attend<kCacheFp16>(of, of.window, queries, page_at); break;
      default: attend<kCacheInt8>(of, of.window, queries, page_at);
    }
    for (int i = 0; i < n_queries; i++)
      std::memcpy(attended + (int64_t)(row0 + i / repeat) * wide + (first_head + i % repeat) * size,
                  queries.result + (int64_t)i * padded_size, sizeof(float) * (size_t)size);
  }

  // adapted: the block whose adapters add to it; null of experts, which read other rows than the frame's.
  void mlp(const MdiMlp& mlp, const float* x, int n, float* y, const MdiBlock* adapted = nullptr) {
    int width = mlp.fc_1.n_out;
    float* gate = scratch_.gate.of((size_t)n * width);
    float* up = mlp.fc_2.data ? scratch_.up.of((size_t)n * width) : nullptr;
    Products products;
    products.add(mlp.fc_1, gate);
    if (up) products.add(mlp.fc_2, up);
    multiply(products, x, n);
    if (adapted) adapt(*adapted, kFc1, x, gate, width);
    if (adapted && up) adapt(*adapted, kFc2, x, up, width);
    int kind = mlp.activation;
    team_.run_rows(n, [&](int m, int) {
      float* g = gate + (int64_t)m * width;
      for (int i = 0; i < width; i += 16) {
        F a = load_part(g + i, width - i), b = up ? load_part(up + (int64_t)m * width + i, width - i) : splat(1.0f);
        if (kind == kClampedGlu) a = clamped_glu(a, b, splat(mlp.limit));
        else a = up ? mul(activate(a, kind), b) : activate(a, kind);
        store_part(g + i, a, width - i);
      }
    });
    multiply(mlp.proj, gate, n, y);
    if (adapted) adapt(*adapted, kProj, gate, y, mlp.proj.n_out);
  }

  const float* normalized_for_mlp(const MdiBlock& block, const float* x) {
    return normalized(block.norm_is_shared ? block.norm_1 : block.norm_2, x);
  }

  // Where a step puts what the MLP gives: behind what attention gave, where both read the same rows.
  float* of_mlp(const MdiBlock& block) {
    size_t n_floats = (size_t)n_ * stage_.n_embd;
    return scratch_.result.of(2 * n_floats) + (block.residual == kParallel ? n_floats : 0);
  }

  void end_step(const MdiBlock& block) {
    float* z = of_mlp(block);
    if (block.residual == kParallel) add_normed(block, block.post_attention_norm, scratch_.result.data());
    add_normed(block, block.post_mlp_norm, z);
    finish(block);
  }

  // The shared expert's results, to y, and the best experts of each row, weighted by the router, to scratch, where the rows that
  // experts read are then, too. x: normed rows of `before`.
  void choose_experts(const MdiBlock& block, const float* before, const float* x, float* y) {
    const MdiExperts& of = block.experts;
    int width = stage_.n_embd, n_expert = of.n, k = of.n_used;
    bool is_apart = of.norm_router.weight;
    if (block.mlp.fc_1.data) mlp(block.mlp, x, n_, y);
    if (of.shared_gate.data) {
      float* gate = scratch_.router.of((size_t)n_);
      multiply(of.shared_gate, x, n_, gate);
      open_gates(gate, y, width, 1);
    }
    if (is_apart) {
      normalize_rows(of.norm_behind_shared, y);
      x = normalized(of.norm_router, before);
    }
    float* scores = scratch_.router.of((size_t)n_ * n_expert);
    multiply(of.router, x, n_, scores);
    int32_t* choice = scratch_.choice.of((size_t)n_ * k);
    float* probability = scratch_.probability.of((size_t)n_ * k);
    for (int m = 0; m < n_; m++)
      choose(of, scores + (int64_t)m * n_expert, choice + m * k, probability + m * k);
    for (int i = 0; of.scales && i < n_ * k; i++) probability[i] *= of.scales[choice[i]];
    scratch_.read_by_experts = is_apart ? normalized(of.norm, before) : x;
    std::memset(scratch_.expert.of((size_t)2 * n_ * width), 0, sizeof(float) * (size_t)n_ * width);
  }

  // What the chosen ones of the experts [first, end) give, added in the order of their numbers.
  void add_experts(const MdiBlock& block, int first, int end) {
    const MdiExperts& of = block.experts;
    int width = stage_.n_embd, k = of.n_used;
    const int32_t* choice = scratch_.choice.data();
    const float* probability = scratch_.probability.data();
    float* sum = scratch_.expert.data();
    float* out = sum + (size_t)n_ * width;
    float* chosen = scratch_.chosen.of((size_t)n_ * width);
    for (int e = first; e < end; e++) {
      int n = 0;
      for (int m = 0; m < n_; m++)
        for (int i = 0; i < k; i++)
          if (choice[m * k + i] == e)
            std::memcpy(chosen + (int64_t)n++ * width, scratch_.read_by_experts + (int64_t)m * width, sizeof(float) * (size_t)width);
      if (!n) continue;
      mlp(of.experts[e], chosen, n, out);
      n = 0;
      for (int m = 0; m < n_; m++)
        for (int i = 0; i < k; i++)
          if (choice[m * k + i] == e) {
            float p = probability[m * k + i] * of.scale;
            const float* from = out + (int64_t)n++ * width;
            for (int j = 0; j < width; j++) sum[(int64_t)m * width + j] += p * from[j];
          }
    }
  }

  // y, the shared expert's results, becomes the sum of all.
  void join_experts(const MdiBlock& block, float* y) {
    float* sum = scratch_.expert.data();
    if (block.experts.norm_router.weight) normalize_rows(block.experts.norm_behind, sum);
    for (int64_t i = 0; i < (int64_t)n_ * stage_.n_embd; i++) y[i] = block.mlp.fc_1.data ? sum[i] + y[i] : sum[i];
  }

  // The k largest scores, in falling order, the lower number first among equals; and a softmax over them. With a correction,
  // scores become sigmoids, the k largest sums of both are taken, and their scores divided by what these add up to. NaN if any
  // score is not finite.
  void choose(const MdiExperts& of, float* score, int32_t* choice, float* probability) {
    const float* correction = of.correction;
    int n = of.n, k = of.n_used;
    float total = 0;
    for (int i = 0; i < n; i++) total += score[i] - score[i];
    const float* by = score;
    if (correction) {
      float* sums = scratch_.corrected.of((size_t)n);
      for (int i = 0; i < n; i += 16) {
        F s = sigmoid(load_part(score + i, n - i));
        store_part(score + i, s, n - i);
        store_part(sums + i, add(s, load_part(correction + i, n - i)), n - i);
      }
      if (of.n_groups > 1) keep_groups(of, sums);
      by = sums;
    }
    take_largest(by, n, k, choice);
    alignas(64) float e[16];
    if (correction) total += 1e-20f;
    for (int i = 0; i < k; i++) {
      if (correction) e[0] = score[choice[i]];
      else store(e, exp(splat(score[choice[i]] - score[choice[0]])));
      probability[i] = e[0];
      total += e[0];
    }
    for (int i = 0; i < k; i++) probability[i] /= total;
  }

  // Numbers of the k largest of n, in falling order, the lower number first among equals.
  static void take_largest(const float* by, int n, int k, int32_t* choice) {
    for (int i = 0; i < k; i++) {
      int best = -1;
      for (int e = 0; e < n; e++) {
        bool taken = false;
        for (int j = 0; j < i; j++) taken = taken || choice[j] == e;
        if (!taken && (best < 0 || by[e] > by[best])) best = e;
      }
      choice[i] = best;
    }
  }

  // Makes minus infinity of the sums of experts outside of the groups that are used.
  void keep_groups(const MdiExperts& of, float* sums) {
    int each = of.n / of.n_groups, most = of.n_scores > of.n_used_groups ? of.n_scores : of.n_used_groups;
    int32_t* taken = scratch_.taken.of((size_t)most);
    float* of_groups = scratch_.of_groups.of((size_t)of.n_groups);
    for (int g = 0; g < of.n_groups; g++) {
      take_largest(sums + g * each, each, of.n_scores, taken);
      of_groups[g] = 0;
      for (int i = 0; i < of.n_scores; i++) of_groups[g] += sums[g * each + taken[i]];
    }
    take_largest(of_groups, of.n_groups, of.n_used_groups, taken);
    for (int g = 0; g < of.n_groups; g++) {
      bool used = false;
      for (int i = 0; i < of.n_used_groups; i++) used = used || taken[i] == g;
      for (int e = g * each; !used && e < (g + 1) * each; e++) sums[e] = -__builtin_inff();
    }
  }

  const MdiStage& stage_;
  const MdiFrame& frame_;
  Team& team_;
  Scratch& scratch_;
  int n_;
};

}  // namespace MDI_NS
