// Gated delta nets: what the state of each head takes in, row by row, and what it gives (mdi/model/spec.py has the formula).
//
// A sequence has of each block the state in front of its kept rows, the state behind some of them, n_taps - 1 rows that the
// convolution still needs, and the kept rows (mdi/kernels/states.py). A head's state is (k_size, v_size). Each number of it is
// computed by the same operations in the same order, one row after the other, whatever comes in one frame.
#pragma once

namespace MDI_NS {

constexpr float kLengthEps = 1e-6f;  // added to the squares of a query's or key's length
constexpr int kTaskColumns = 32;         // of a head's state that a task takes through all rows: few enough to stay in the cache
constexpr int kMostSeen = 256;       // rows whose convolutions are kept at a time, unless a slice alone has more

struct DeltaScratch {
  struct PerThread { Buffer<float> columns; };
  Buffer<float> seen;
  PerThread threads[kMostThreads];
};

inline int channels(const MdiDelta& of) { return 2 * of.n_groups * of.k_size + of.n_head * of.v_size; }
inline int row_floats(const MdiDelta& of) { return channels(of) + 2 * of.n_head; }  // of a kept row: also b and e^g of each head

// What is kept of one block of a sequence.
struct DeltaView {
  float *before, *behind, *rows;
  int64_t *first, *next;  // positions of the first kept row, and of the row that `behind` takes in next

  float* row(const MdiDelta& of, int64_t position) const {
    return rows + (position - *first + of.n_taps - 1) * row_floats(of);
  }
};

inline DeltaView view(const MdiDelta& of, const MdiStates& states) {
  float* numbers = states.numbers + of.cache_layer * states.block_floats;
  int64_t n = (int64_t)of.n_head * of.k_size * of.v_size, *places = states.places + 2 * of.cache_layer;
  return {numbers, numbers + n, numbers + 2 * n, places, places + 1};
}

// ln(1 + e^x): the larger of x and 0, and ln(1 + t) of t = e^-|x|, which is twice the series of the area tangent of t / (2 + t).
inline F softplus(F x) {
  F t = exp(sub(splat(0.0f), abs(x)));
  F s = div(t, add(splat(2.0f), t)), square = mul(s, s);
  F p = splat(1.0f / 15);
  for (int n = 13; n > 0; n -= 2) p = fma(p, square, splat(1.0f / (float)n));
  return fma(add(s, s), p, max(splat(0.0f), x));
}

// b and a of each head -> their sigmoid and e^g, which are not finite where these are not.
inline void keep_gates(const MdiDelta& of, const float* gates, float* to) {
  int n = of.n_head;
  for (int i = 0; i < n; i += 16) {
    F b = load_part(gates + i, n - i), a = load_part(gates + n + i, n - i);
    F step = softplus(add(a, load_part(of.dt_bias + i, n - i)));
    F decay = exp(sub(splat(0.0f), mul(exp(load_part(of.log_rate + i, n - i)), step)));
    store_part(to + i, add(sigmoid(b), sub(b, b)), n - i);
    store_part(to + n + i, add(decay, sub(a, a)), n - i);
  }
}

// The last of n_taps kept rows -> (channels): what the convolution makes of them, queries and keys brought to their lengths.
inline void convolve(const MdiDelta& of, const float* rows, float* to) {
  int n = channels(of), each = row_floats(of), size = of.k_size;
  for (int i = 0; i < n; i += 16) {
    F sum = mul(load_part(rows + i, n - i), load_part(of.taps + i, n - i));
    for (int t = 1; t < of.n_taps; t++)
      sum = fma(load_part(rows + t * each + i, n - i), load_part(of.taps + t * n + i, n - i), sum);
    store_part(to + i, activate(sum, kSilu), n - i);
  }
  for (int h = 0; h < 2 * of.n_groups; h++) {
    float* head = to + h * size;
    float factor = 1.0f / __builtin_sqrtf(sum_of(head, size, [](F a) { return mul(a, a); }) + kLengthEps);
    F by = splat(h < of.n_groups ? factor * of.scale : factor);
    for (int i = 0; i < size; i += 16) store_part(head + i, mul(load_part(head + i, size - i), by), size - i);
  }
}

inline F load_at_most(const float* p, int n) { return n > 0 ? load_part(p, n) : splat(0.0f); }
inline void store_at_most(float* p, F x, int n) { if (n > 0) store_part(p, x, n); }

// Two vectors of columns of a state, of which there may be fewer numbers.
struct Columns {
  float* at;
  int stride, n_low, n_high;
  F low(int i) const { return load_part(at + (int64_t)i * stride, n_low); }
  F high(int i) const { return load_at_most(at + (int64_t)i * stride + 16, n_high); }
  void store(int i, F a, F b) const {
    store_part(at + (int64_t)i * stride, a, n_low), store_at_most(at + (int64_t)i * stride + 16, b, n_high);
  }
};

// Rows that a state takes in.
struct TakenIn {
  const float *from, *seen, *kept;  // the state in front of them, their convolutions, and themselves
  float *to, *given;                // the state behind them; what the heads give, (n - n_known, n_head, v_size)
  int n, n_known;                   // the first ones have given already
};

// Columns [first, first + kTaskColumns) of a head's state take in rows. own: memory for them, where they stay between two rows.
inline void take_in(const MdiDelta& of, const TakenIn& rows, int head, int first, float* own) {
  int k = of.k_size, size = of.v_size, n_low = size - first, n_high = n_low - 16, wide = channels(of), each = row_floats(of);
  int group = of.is_in_turn ? head % of.n_groups : head / (of.n_head / of.n_groups);
  int64_t at = (int64_t)head * k * size + first;
  for (int m = 0; m < rows.n; m++) {
    const float *q = rows.seen + (int64_t)m * wide + group * k, *key = q + of.n_groups * k;
    const float *gates = rows.kept + (int64_t)m * each + wide, *v = rows.seen + (int64_t)m * wide + 2 * of.n_groups * k + head * size + first;
    Columns in = m ? Columns{own, kTaskColumns, 16, 16} : Columns{(float*)rows.from + at, size, n_low, n_high};
    Columns out = m + 1 < rows.n ? Columns{own, kTaskColumns, 16, 16} : Columns{rows.to + at, size, n_low, n_high};
    F b = splat(gates[head]), decay = splat(gates[of.n_head + head]);
    F low[2] = {splat(0.0f), splat(0.0f)}, high[2] = {splat(0.0f), splat(0.0f)};  // of keys with even and with odd numbers
    for (int i = 0; i < k; i += 2)
      for (int odd = 0; odd < 2 && i + odd < k; odd++) {
        F x = splat(key[i + odd]);
        low[odd] = fma(x, in.low(i + odd), low[odd]), high[odd] = fma(x, in.high(i + odd), high[odd]);
      }
    F low_change = mul(b, sub(load_part(v, n_low), mul(decay, add(low[0], low[1]))));
    F high_change = mul(b, sub(load_at_most(v + 16, n_high), mul(decay, add(high[0], high[1]))));
    low[0] = low[1] = high[0] = high[1] = splat(0.0f);
    for (int i = 0; i < k; i += 2)
      for (int odd = 0; odd < 2 && i + odd < k; odd++) {
        F x = splat(key[i + odd]), y = splat(q[i + odd]);
        F a = fma(x, low_change, mul(decay, in.low(i + odd))), c = fma(x, high_change, mul(decay, in.high(i + odd)));
        out.store(i + odd, a, c);
        low[odd] = fma(y, a, low[odd]), high[odd] = fma(y, c, high[odd]);
      }
    if (m < rows.n_known) continue;
    float* given = rows.given + (int64_t)(m - rows.n_known) * of.n_head * size + head * size + first;
    store_part(given, add(low[0], low[1]), n_low);
    store_at_most(given + 16, add(high[0], high[1]), n_high);
  }
}

// The states of one block take in the rows of a frame.
class DeltaStates {
 public:
  DeltaStates(const MdiDelta& of, const MdiStage& stage, const MdiFrame& frame, Team& team, DeltaScratch& scratch)
      : of_(of), stage_(stage), frame_(frame), team_(team), scratch_(scratch) {}

  // qkv (n, channels) and gates (n, 2 * n_head) of all rows -> given (n, n_head, v_size).
  void take_in(const float* qkv, const float* gates, float* given) {
    int row = 0;
    for (int s = 0; s < frame_.n_slices;) {
      int first = s, n_seen = 0;
      Job jobs[kMostJobs];
      for (; s < frame_.n_slices && s - first < kMostJobs; s++) {
        Job& job = jobs[s - first];
        job.states = view(of_, states_of(s));
        int n = n_final(s, job.states);
        if (s > first && n_seen + n > kMostSeen) break;
        job.rows = {job.states.before, nullptr, n ? job.states.row(of_, *job.states.first) : nullptr, job.states.before, nullptr, n, n};
        n_seen += n;
      }
      if (n_seen) compute(jobs, s - first, n_seen);
      for (int i = 0; i < s - first; i++) drop(jobs[i].states, jobs[i].rows.n, frame_.slices[first + i].start);
    }
    for (int s = 0; s < frame_.n_slices;) {
      int first = s, n_seen = 0;
      Job jobs[kMostJobs];
      for (; s < frame_.n_slices && s - first < kMostJobs; s++) {
        const MdiSlice& slice = frame_.slices[s];
        Job& job = jobs[s - first];
        DeltaView states = job.states = view(of_, states_of(s));
        bool is_cut = *states.next < *states.first || *states.next > slice.start;
        int64_t next = is_cut ? *states.first : *states.next;
        int n_known = (int)(slice.start - next), n = n_known + slice.n_rows;
        if (s > first && n_seen + n > kMostSeen) break;
        keep(states, slice, qkv + (int64_t)row * channels(of_), gates + (int64_t)row * 2 * of_.n_head);
        job.rows = {is_cut ? states.before : states.behind, nullptr, states.row(of_, next), states.behind,
                    given + (int64_t)row * of_.n_head * of_.v_size, n, n_known};
        n_seen += n, row += slice.n_rows;
      }
      compute(jobs, s - first, n_seen);
      for (int i = 0; i < s - first; i++)
        *jobs[i].states.next = frame_.slices[first + i].start + frame_.slices[first + i].n_rows;
    }
  }

 private:
  static constexpr int kMostJobs = 64;
  struct Job {
    DeltaView states;
    TakenIn rows;
  };

  const MdiStates& states_of(int slice) const { return frame_.states[slice * stage_.n_state_classes + of_.cache_class]; }

  // Rows that are final now: the first state takes them in.
  int n_final(int s, const DeltaView& states) const {
    int64_t n = states_of(s).first - *states.first;
    return n > 0 ? (int)n : 0;
  }

  // Forgets the first n rows of those before `end`.
  void drop(const DeltaView& states, int n, int end) const {
    if (!n) return;
    *states.first += n;
    size_t n_left = (size_t)(end - *states.first + of_.n_taps - 1);
    std::memmove(states.rows, states.rows + (int64_t)n * row_floats(of_), sizeof(float) * n_left * row_floats(of_));
  }

  void keep(const DeltaView& states, const MdiSlice& slice, const float* qkv, const float* gates) const {
    int n = channels(of_);
    team_.run_rows(slice.n_rows, [&](int m, int) {
      float* to = states.row(of_, slice.start + m);
      std::memcpy(to, qkv + (int64_t)m * n, sizeof(float) * (size_t)n);
      keep_gates(of_, gates + (int64_t)m * 2 * of_.n_head, to + n);
    });
  }

  void compute(Job* jobs, int n_jobs, int n_seen) {
    int wide = channels(of_), each = row_floats(of_);
    float* seen = scratch_.seen.of((size_t)n_seen * wide);
    for (int i = 0; i < n_jobs; seen += (int64_t)jobs[i++].rows.n * wide) jobs[i].rows.seen = seen;
    seen = scratch_.seen.data();
    team_.run_rows(n_seen, [&](int row, int) {
      int i = 0, m = row;
      while (m >= jobs[i].rows.n) m -= jobs[i++].rows.n;
      convolve(of_, jobs[i].rows.kept + (int64_t)(m + 1 - of_.n_taps) * each, seen + (int64_t)row * wide);
    });
    int n_parts = (of_.v_size + kTaskColumns - 1) / kTaskColumns, n_each = of_.n_head * n_parts;
    team_.run(n_jobs * n_each, [&](int task, int thread) {
      const TakenIn& rows = jobs[task / n_each].rows;
      int part = task % n_each;
      if (rows.n)
        MDI_NS::take_in(of_, rows, part / n_parts, part % n_parts * kTaskColumns,
                        scratch_.threads[thread].columns.of((size_t)of_.k_size * kTaskColumns));
    });
  }

  const MdiDelta& of_;
  const MdiStage& stage_;
  const MdiFrame& frame_;
  Team& team_;
  DeltaScratch& scratch_;
};

}  // namespace MDI_NS
