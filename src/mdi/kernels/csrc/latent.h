// Attention over latent rows, which all heads share: keys are whole rows, values their first kv_rank numbers. As in attention.h,
// each query updates its maximum, its sum and its result page after page.
//
// A page has, for each block of its class: rows (32, head_size), and for int8 the scales of their first kv_rank numbers, then
// those of what is rotated. Both sizes are multiples of 16.
#pragma once

namespace MDI_NS {

inline int64_t latent_slot_bytes(const MdiAttention& of) {
  int64_t bytes = (int64_t)of.head_size * kPage * cache_item_bytes(of.cache_type) + (of.cache_type == kCacheInt8 ? 2 * kPage * 4 : 0);
  return (bytes + 63) / 64 * 64;
}

// Values are in the rows.
inline PageView latent_view(const MdiAttention& of, uint8_t* page, int layer) {
  uint8_t* rows = page + layer * latent_slot_bytes(of);
  float* scales = (float*)(rows + (int64_t)of.head_size * kPage * cache_item_bytes(of.cache_type));
  return {rows, rows, scales + kPage, scales};
}

// Brings the row of one position to its place in a page.
inline void append_latent(const MdiAttention& of, int kv_rank, const PageView& page, int place, const float* row) {
  int type = of.cache_type, bounds[3] = {0, kv_rank, of.head_size};
  for (int part = 0; part < 2; part++) {
    int first = bounds[part], end = bounds[part + 1];
    float inverse = 0;
    if (type == kCacheInt8) {
      float most = largest_of(row + first, end - first);
      (part ? page.key_scales : page.value_scales)[place] = most / 127.0f;
      inverse = most > 1e-35f ? 127.0f / most : 0;
    }
    for (int i = first; i < end; i++) put(type, page.keys, (int64_t)place * of.head_size + i, row[i], inverse);
  }
}

// Products of kN queries, (kN, head_size), with the rows [seen.first, seen.end) of a page; zero with all others.
template <int kType, int kN>
inline void multiply_latents(const MdiAttention& of, int kv_rank, const PageView& page, Range seen, const float* q, F (&s)[kN][2]) {
  alignas(64) float products[kN][kPage] = {};
  int size = of.head_size;
  for (int p = seen.first; p < seen.end; p++) {
    F sums[kN];
    #pragma GCC unroll 8
    for (int i = 0; i < kN; i++) sums[i] = splat(0.0f);
    for (int d = 0; d < kv_rank; d += 16) {
      F x = load_cached<kType>(page.keys, (int64_t)p * size + d);
      #pragma GCC unroll 8
      for (int i = 0; i < kN; i++) sums[i] = fma(load(q + i * size + d), x, sums[i]);
    }
    F scale = splat(kType == kCacheInt8 ? page.key_scales[p] : 1.0f);
    if constexpr (kType == kCacheInt8)
      #pragma GCC unroll 8
      for (int i = 0; i < kN; i++) sums[i] = mul(sums[i], splat(page.value_scales[p]));
    for (int d = kv_rank; d < size; d += 16) {
      F x = load_cached<kType>(page.keys, (int64_t)p * size + d);
      if constexpr (kType == kCacheInt8) x = mul(x, scale);
      #pragma GCC unroll 8
      for (int i = 0; i < kN; i++) sums[i] = fma(load(q + i * size + d), x, sums[i]);
    }
    #pragma GCC unroll 8
    for (int i = 0; i < kN; i++) products[i][p] = sum(sums[i]);
  }
  for (int i = 0; i < kN; i++)
    for (int half = 0; half < 2; half++) s[i][half] = load(products[i] + 16 * half);
}

// Heads of one row from `at` on against a page, kN at a time, the last ones fewer. q: (heads, head_size).
template <int kType, int kN>
inline void attend_latents(const MdiAttention& of, int kv_rank, const PageView& page, int first_position, const float* q,
                           const Queries& queries, int at) {
  Ahead none{nullptr, nullptr, 0};
  for (; at + kN <= queries.n; at += kN) {
    Range seen = visible(queries.position[at], first_position, of.window);
    F s[kN][2];
    multiply_latents<kType, kN>(of, kv_rank, page, seen, q + (int64_t)at * of.head_size, s);
    weigh<kCacheFloat32, kN>(of, page, first_position, of.window, queries, at, kv_rank, s);  // they have the scales of int8
    add_parts<kType, kN, parts(kN)>(page, of.head_size, seen.first, seen.end, queries, at, kv_rank, 0, none);
  }
  if constexpr (kN > 1)
    if (at < queries.n) attend_latents<kType, kN / 2>(of, kv_rank, page, first_position, q, queries, at);
}

}  // namespace MDI_NS
