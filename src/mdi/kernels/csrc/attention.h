// Attention over caches that lie in pages of 32 positions, counted from position 0. Page after page, each query updates its
// maximum, its sum and its result (online softmax, Milakov and Gimelshein 2018), in an order that only its position decides.
// A sink (Xiao et al. 2023; here a learned score of each head) is there before the first key, and adds nothing to the result.
//
// A page has, for each block of its class and each group of heads: keys with positions side by side (head_size, 32), values
// (32, head_size rounded up to 16), and for int8 the scales of 32 keys and of 32 values.
#pragma once

namespace MDI_NS {

constexpr int kPage = 32;
constexpr int kQueries = kSums > 8 ? 8 : 4;  // that share keys and values while these are in registers
constexpr int kKeyPasses = 2 * kQueries <= kSums ? 1 : 2;  // over the keys of a page, for so many queries
constexpr int parts(int n_queries) { return kSums / n_queries < 4 ? kSums / n_queries : 4; }  // sixteens of a value at a time
constexpr int kRowBlock = 16;  // rows of a prompt that one task takes through all pages

inline int cache_item_bytes(int type) { return type == kCacheFloat32 ? 4 : type == kCacheInt8 ? 1 : 2; }

// Where the keys and values of one block and group lie in a page.
struct PageView {
  uint8_t* keys;
  uint8_t* values;
  float* key_scales;    // int8 only
  float* value_scales;
};

inline int64_t slot_bytes(const MdiAttention& of) {
  int64_t numbers = (int64_t)(of.head_size + padded(of.head_size, 16)) * kPage;
  int64_t bytes = numbers * cache_item_bytes(of.cache_type) + (of.cache_type == kCacheInt8 ? 2 * kPage * 4 : 0);
  return (bytes + 63) / 64 * 64;
}

inline PageView view(const MdiAttention& of, uint8_t* page, int layer, int group) {
  uint8_t* slot = page + ((int64_t)layer * of.n_groups + group) * slot_bytes(of);
  int64_t key_bytes = (int64_t)of.head_size * kPage * cache_item_bytes(of.cache_type);
  uint8_t* values = slot + key_bytes;
  uint8_t* scales = values + (int64_t)padded(of.head_size, 16) * kPage * cache_item_bytes(of.cache_type);
  return {slot, values, (float*)scales, (float*)scales + kPage};
}

inline uint16_t to_bf16(float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline uint16_t to_half(float x) {
  uint16_t out[16];
  store_half(out, splat(x));
  return out[0];
}

// Writes number i of a key or value at element `at` of the cache; `inverse` is 127 / largest for int8.
inline void put(int type, uint8_t* to, int64_t at, float x, float inverse) {
  if (type == kCacheFloat32) ((float*)to)[at] = x;
  else if (type == kCacheBf16) ((uint16_t*)to)[at] = to_bf16(x);
  else if (type == kCacheFp16) ((uint16_t*)to)[at] = to_half(x);
  else ((int8_t*)to)[at] = inverse > 0 ? (int8_t)__builtin_nearbyintf(x * inverse) : 0;  // 0 beside a scale of NaN, too
}

// The largest of the absolute values; NaN if a number is not finite.
inline float largest_of(const float* x, int n) {
  F most = splat(0.0f), zero = splat(0.0f);  // x - x is zero, or NaN
  for (int i = 0; i < n; i += 16) {
    F part = load_part(x + i, n - i);
    most = max(most, abs(part)), zero = add(zero, sub(part, part));
  }
  return largest(most) + sum(zero);
}

// Brings key and value of one row, (head_size) each, to its place in a page.
inline void append(const MdiAttention& of, const PageView& page, int place, const float* key, const float* value) {
  int n = of.head_size, wide = padded(n, 16), type = of.cache_type;
  float key_inverse = 0, value_inverse = 0;
  if (type == kCacheInt8) {
    float most_key = largest_of(key, n), most_value = largest_of(value, n);
    page.key_scales[place] = most_key / 127.0f, page.value_scales[place] = most_value / 127.0f;
    key_inverse = most_key > 1e-35f ? 127.0f / most_key : 0, value_inverse = most_value > 1e-35f ? 127.0f / most_value : 0;
  }
  for (int i = 0; i < n; i++) put(type, page.keys, (int64_t)i * kPage + place, key[i], key_inverse);
  for (int i = 0; i < wide; i++) put(type, page.values, (int64_t)place * wide + i, i < n ? value[i] : 0.0f, value_inverse);
}

template <int kType>
inline F load_cached(const uint8_t* from, int64_t at) {
  if constexpr (kType == kCacheFloat32) return load((const float*)from + at);
  if constexpr (kType == kCacheBf16) return load_bf16((const uint16_t*)from + at);
  if constexpr (kType == kCacheFp16) return load_half((const uint16_t*)from + at);
  if constexpr (kType == kCacheInt8) return load_bytes((const int8_t*)from + at);
}

// How many of n queries are multiplied at a time from number `at` on.
inline int together(int at, int n) {
  int most = kQueries;
  while (at + most > n) most /= 2;
  return most;
}

// Queries of one slice and group, row after row, the heads of a row side by side.
struct Queries {
  const float* q;         // blocks of together(...) queries one after the other: (head_size, queries of the block)
  const int32_t* position;
  const float* const* bias;  // (n) pointers to what is added to the scores of the keys from position 0 on; or null
  float* weights;         // (n, 32) of the page at hand
  float* most;            // (n) largest score so far; at first that of a sink, or minus infinity
  float* total;           // (n) sum of e^(score - most); at first 1 with a sink, or 0
  float* result;          // (n, wide)
  int n;
};

// Whether the next page is asked for during the products with values, too: with float32, products with keys alone would ask for
// it faster than memory gives it.
template <int kType> constexpr bool kWithValues = kType == kCacheFloat32;

// Memory that is read next. It is brought into the cache meanwhile, an equal part in each round of the loops.
struct Ahead {
  const uint8_t *at, *end;
  int step;  // bytes; may be less than a line

  void go_on() {
    for (int i = 0; i < step; i += 64) prefetch(at + i);
    at += step;
  }
};

// Products of queries with the keys of a page, halves [kFirst, kEnd) of it.
template <int kType, int kN, int kFirst, int kEnd>
inline void multiply_keys(const MdiAttention& of, const PageView& page, const Queries& queries, int at, Ahead& ahead,
                          F (&s)[kN][2]) {
  F sums[kN][kEnd - kFirst];
  const float* numbers = queries.q + (int64_t)at * of.head_size;
  #pragma GCC unroll 8
  for (int i = 0; i < kN; i++)
    #pragma GCC unroll 8
    for (int half = kFirst; half < kEnd; half++) sums[i][half - kFirst] = splat(0.0f);
  for (int d = 0; d < of.head_size; d++) {
    ahead.go_on();
    F keys[kEnd - kFirst];
    #pragma GCC unroll 8
    for (int half = kFirst; half < kEnd; half++)
      keys[half - kFirst] = load_cached<kType>(page.keys, (int64_t)d * kPage + 16 * half);
    #pragma GCC unroll 8
    for (int i = 0; i < kN; i++) {
      F q = splat(numbers[d * kN + i]);
      #pragma GCC unroll 8
      for (int half = 0; half < kEnd - kFirst; half++) sums[i][half] = fma(q, keys[half], sums[i][half]);
    }
  }
  #pragma GCC unroll 8
  for (int i = 0; i < kN; i++)
    #pragma GCC unroll 8
    for (int half = kFirst; half < kEnd; half++) s[i][half] = sums[i][half - kFirst];
}

// Products of queries with the keys of a page, made weights; sums and results so far are brought to the new maximum.
template <int kType, int kN>
inline void weigh(const MdiAttention& of, const PageView& page, int first_position, int window, const Queries& queries, int at,
                  int wide, F (&s)[kN][2]) {
  F none = splat(-__builtin_inff());
  float most[kN];
  bool sees[kN];  // something of the page
  for (int i = 0; i < kN; i++) {
    int position = queries.position[at + i] - first_position;
    int last = position < kPage - 1 ? position : kPage - 1, first = window ? position - window + 1 : 0;
    sees[i] = last >= 0 && first <= last;
    if (!sees[i]) continue;
    for (int half = 0; half < 2; half++) {
      F x = mul(s[i][half], splat(of.scale));
      if constexpr (kType == kCacheInt8) x = mul(x, load(page.key_scales + 16 * half));
      x = sub(x, sub(x, x));  // NaN if it is infinite: minus infinity would have no weight, and a cap would make it a number
      if (of.softcap != 0) x = mul(tanh(div(x, splat(of.softcap))), splat(of.softcap));
      if (queries.bias) x = add(x, load(queries.bias[at + i] + first_position + 16 * half));
      int end = last + 1 - 16 * half, start = first - 16 * half;
      if (end < 16) x = first_lanes(x, end > 0 ? end : 0, none);
      if (start > 0) x = first_lanes(none, start < 16 ? start : 16, x);
      s[i][half] = x;
    }
    float before = queries.most[at + i], here = largest(max(s[i][0], s[i][1]));
    most[i] = here > before ? here : before;
  }
  for (int i = 0; i < kN; i++) {  // apart, so that the processor can do several at a time
    if (!sees[i]) continue;
    F low = exp(sub(s[i][0], splat(most[i]))), high = exp(sub(s[i][1], splat(most[i])));
    store(queries.weights + (at + i) * kPage, low);
    store(queries.weights + (at + i) * kPage + 16, high);
    float all = sum(add(low, high)), before = queries.most[at + i];
    if (most[i] == before && __builtin_fabsf(before) < __builtin_inff()) {  // as mostly; e^0 is 1, and infinity makes NaN below
      queries.total[at + i] += all;
      continue;
    }
    F change = exp(splat(before - most[i]));
    float shrink;
    { alignas(64) float lanes[16]; store(lanes, change); shrink = lanes[0]; }
    queries.most[at + i] = most[i];
    queries.total[at + i] = queries.total[at + i] * shrink + all;
    float* result = queries.result + (int64_t)(at + i) * wide;
    for (int d = 0; d < wide; d += 16) store(result + d, mul(load(result + d), change));
  }
}

// Scores of up to kQueries queries against a page, made weights.
template <int kType, int kN>
inline void score(const MdiAttention& of, const PageView& page, int first_position, int window, const Queries& queries, int at,
                  Ahead& ahead) {
  F s[kN][2];
  if constexpr (2 * kN <= kSums) {
    multiply_keys<kType, kN, 0, 2>(of, page, queries, at, ahead, s);
  } else {
    multiply_keys<kType, kN, 0, 1>(of, page, queries, at, ahead, s);
    multiply_keys<kType, kN, 1, 2>(of, page, queries, at, ahead, s);
  }
  weigh<kType, kN>(of, page, first_position, window, queries, at, padded(of.head_size, 16), s);
}

// Values from number d on, 16 * kParts of them at a time. stride: numbers from one position to the next.
template <int kType, int kN, int kParts>
inline void add_parts(const PageView& page, int stride, int first, int end, const Queries& queries, int at, int wide, int d,
                      Ahead& ahead) {
  for (; d + 16 * kParts <= wide; d += 16 * kParts) {
    F sums[kN][kParts];
    #pragma GCC unroll 8
    for (int i = 0; i < kN; i++)
      #pragma GCC unroll 8
      for (int j = 0; j < kParts; j++) sums[i][j] = load(queries.result + (int64_t)(at + i) * wide + d + 16 * j);
    for (int p = first; p < end; p++) {
      if constexpr (kWithValues<kType>) ahead.go_on();
      F v[kParts];
      #pragma GCC unroll 8
      for (int j = 0; j < kParts; j++) {
        v[j] = load_cached<kType>(page.values, (int64_t)p * stride + d + 16 * j);
        if constexpr (kType == kCacheInt8) v[j] = mul(v[j], splat(page.value_scales[p]));
      }
      #pragma GCC unroll 8
      for (int i = 0; i < kN; i++) {
        F weight = splat(queries.weights[(at + i) * kPage + p]);
        #pragma GCC unroll 8
        for (int j = 0; j < kParts; j++) sums[i][j] = fma(weight, v[j], sums[i][j]);
      }
    }
    #pragma GCC unroll 8
    for (int i = 0; i < kN; i++)
      #pragma GCC unroll 8
      for (int j = 0; j < kParts; j++) store(queries.result + (int64_t)(at + i) * wide + d + 16 * j, sums[i][j]);
  }
  if constexpr (kParts > 1)
    if (d < wide) add_parts<kType, kN, kParts / 2>(page, stride, first, end, queries, at, wide, d, ahead);
}

template <int kType, int kN>
inline void add_values(const MdiAttention& of, const PageView& page, int first, int end, const Queries& queries, int at, Ahead& ahead) {
  int wide = padded(of.head_size, 16);
  add_parts<kType, kN, parts(kN)>(page, wide, first, end, queries, at, wide, 0, ahead);
}

struct Range { int first, end; };

inline Range visible(int position, int first_position, int window) {  // places of the page that a row at `position` sees
  int last = position - first_position, first = window && last - window + 1 > 0 ? last - window + 1 : 0;
  return {first, last < kPage - 1 ? last + 1 : kPage};
}

template <int kType, int kN>
inline void attend_page(const MdiAttention& of, const PageView& page, int first_position, int window, const Queries& queries, int at,
                        Ahead& ahead) {
  score<kType, kN>(of, page, first_position, window, queries, at, ahead);
  Range all = visible(queries.position[at], first_position, window);
  bool same = true;
  for (int i = 1; i < kN; i++) {
    Range other = visible(queries.position[at + i], first_position, window);
    same = same && other.first == all.first && other.end == all.end;
  }
  if (same) return add_values<kType, kN>(of, page, all.first, all.end, queries, at, ahead);
  for (int i = 0; i < kN; i++) {
    Range own = visible(queries.position[at + i], first_position, window);
    add_values<kType, 1>(of, page, own.first, own.end, queries, at + i, ahead);
  }
}

// Queries from `at` on against a page, kN at a time, the last ones fewer, as `together` says.
template <int kType, int kN>
inline void attend_queries(const MdiAttention& of, const PageView& page, int first_position, int window, const Queries& queries, int at,
                           Ahead& ahead) {
  for (; at + kN <= queries.n; at += kN) {
    if (ahead.at >= ahead.end) ahead.step = 0;
    attend_page<kType, kN>(of, page, first_position, window, queries, at, ahead);
  }
  if constexpr (kN > 1)
    if (at < queries.n) attend_queries<kType, kN / 2>(of, page, first_position, window, queries, at, ahead);
}

// All queries against all pages that any of them sees. `page_at(p)` is the view of the positions from 32 p on.
template <int kType, class PageAt>
void attend(const MdiAttention& of, int window, const Queries& queries, const PageAt& page_at) {
  int wide = padded(of.head_size, 16), lowest = queries.position[0], highest = queries.position[queries.n - 1];
  std::memset(queries.result, 0, sizeof(float) * (size_t)queries.n * wide);
  int first = window && lowest - window + 1 > 0 ? (lowest - window + 1) / kPage : 0;
  int last = highest / kPage;
  int64_t n_bytes = slot_bytes(of), n_rounds = kKeyPasses * of.head_size;
  if (kWithValues<kType>) n_rounds += wide / (16 * parts(kQueries)) * kPage;
  n_rounds *= (queries.n + kQueries - 1) / kQueries;
  for (int p = first; p <= last; p++) {
    const uint8_t* next = p < last ? page_at(p + 1).keys : nullptr;
    Ahead ahead{next, next + (next ? n_bytes : 0), (int)((n_bytes + 16 * n_rounds - 1) / (16 * n_rounds)) * 16};
    attend_queries<kType, kQueries>(of, page_at(p), p * kPage, window, queries, 0, ahead);
  }
  for (int i = 0; i < queries.n; i++) {
    F inverse = splat(1.0f / queries.total[i]);
    float* result = queries.result + (int64_t)i * wide;
    for (int d = 0; d < wide; d += 16) store(result + d, mul(load(result + d), inverse));
  }
}

}  // namespace MDI_NS
