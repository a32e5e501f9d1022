// Sixteen lanes in two AVX2 registers; with MDI_VNNI, products of bytes by AVX-VNNI.
#pragma once
#include <immintrin.h>

#include <cstdint>

#define MDI_ONE_ROW  // blocks.h has a function of its own for one row

namespace MDI_NS {

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct W { __m256i a, b; };

constexpr int tile_rows(int) { return 6; }  // of any format
constexpr int kFloatPanels = 1;
constexpr int kBytePanels = 1;   // the same where weights are bytes
constexpr int kPiece = 4;        // inputs of a row that lie together in its block
constexpr int kSums = 4;         // sums of attention that stay in registers
#ifdef MDI_VNNI
constexpr bool kDotIsUnsigned = true;
constexpr int narrow_lines(int) { return 0; }
constexpr int kUnrolled = 16;    // lines of bytes whose products stand one after the other in the code
#else
constexpr bool kDotIsUnsigned = false;
constexpr int narrow_lines(int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : 2; }  // see H
constexpr int kUnrolled = 2;     // with more, gcc 12 adds up the products at the end, and keeps them on the stack until then
#endif

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline F splat(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F abs(F x) {
  __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline F round(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
inline F choose_greater(F x, F y, F yes, F no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))};
}
inline F first_lanes(F x, int n, F other) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
  __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane));
  return {_mm256_blendv_ps(other.a, x.a, low), _mm256_blendv_ps(other.b, x.b, high)};
}

inline I splat_int(int32_t x) { __m256i v = _mm256_set1_epi32(x); return {v, v}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F power_of_two(I n) {
  __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23))};
}
inline void store_bytes(int8_t* p, I x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i*)p, bytes);
}
inline F load_bytes(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
inline int32_t sum_int(I x) {
  __m256i s = _mm256_add_epi32(x.a, x.b);
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}

inline W load_line(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline W low_halves(W w) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask)};
}
inline W high_halves(W w) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(w.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(w.b, 4), mask)};
}
inline W looked_up(W w, const uint8_t* table) {
  __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(t, w.a), _mm256_shuffle_epi8(t, w.b)};
}
template <int kRight> inline W bits_of(W w, int mask) {
  __m256i m = _mm256_set1_epi8((char)mask);
  if constexpr (kRight < 0) return {_mm256_and_si256(_mm256_slli_epi16(w.a, -kRight), m), _mm256_and_si256(_mm256_slli_epi16(w.b, -kRight), m)};
  else return {_mm256_and_si256(_mm256_srli_epi16(w.a, kRight), m), _mm256_and_si256(_mm256_srli_epi16(w.b, kRight), m)};
}
inline W either(W x, W y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline W less(W w, int n) { __m256i v = _mm256_set1_epi8((char)n); return {_mm256_sub_epi8(w.a, v), _mm256_sub_epi8(w.b, v)}; }
inline void store_line(uint8_t* p, W w) { _mm256_storeu_si256((__m256i*)p, w.a), _mm256_storeu_si256((__m256i*)(p + 32), w.b); }
inline __m256i four_bytes(const int8_t* x) { return _mm256_set1_epi32(*(const int32_t*)x); }
#ifdef MDI_VNNI
inline W int8_line(const uint8_t* p) { return load_line(p); }
inline I dot(I sum, W w, const int8_t* x) {
  __m256i v = four_bytes(x);
  return {_mm256_dpbusd_avx_epi32(sum.a, w.a, v), _mm256_dpbusd_avx_epi32(sum.b, w.b, v)};
}
using H = I;
inline H begin_halves(int32_t start) { return splat_int(start); }
inline H dot_halves(H sum, W w, const int8_t* x) { return dot(sum, w, x); }
inline I end_halves(H sum, I) { return sum; }
constexpr int kMxfp4Lines = 4;  // of a group whose products such a sum holds
#else
// Without VNNI, pairs of products are added in 16 bits: |w| * sign(x, w) stays within 2 * 127 * 127 there.
inline W int8_line(const uint8_t* p) {
  W w = load_line(p);
  __m256i offset = _mm256_set1_epi8((char)0x80);
  return {_mm256_xor_si256(w.a, offset), _mm256_xor_si256(w.b, offset)};
}
inline __m256i add_pairs(__m256i sum, __m256i pairs) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline I dot(I sum, W w, const int8_t* x) {
  __m256i v = four_bytes(x);
  return {add_pairs(sum.a, _mm256_maddubs_epi16(_mm256_abs_epi8(w.a), _mm256_sign_epi8(v, w.a))),
          add_pairs(sum.b, _mm256_maddubs_epi16(_mm256_abs_epi8(w.b), _mm256_sign_epi8(v, w.b)))};
}
// Sums of a group in 16 bits: of int4, 16 products of at most 15 * 127 (30,480 in all); of mxfp4, 8 of at most 24 * 127; of 5 bits 8
// of at most 31 * 127 (31,496), of 6 bits 4 of at most 63 * 127 (32,004).
struct H { __m256i a, b; };
inline H begin_halves(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline H dot_halves(H sum, W w, const int8_t* x) {
  __m256i v = four_bytes(x);
  return {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, v)), _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, v))};
}
inline I end_halves(H sum, I before) { return {add_pairs(before.a, sum.a), add_pairs(before.b, sum.b)}; }
constexpr int kMxfp4Lines = 2;
#endif
inline F byte_of_lane(const uint8_t* line, int shift, int mask) {
  W w = load_line(line);
  __m128i count = _mm_cvtsi32_si128(shift);
  __m256i m = _mm256_set1_epi32(mask);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(w.a, count), m)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srl_epi32(w.b, count), m))};
}

inline F load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline void store_half(uint16_t* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, 0));
}
inline F load_exponents(const uint8_t* p) {
  __m128i e = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(e), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(e, 8)), 23))};
}
inline __m256 widen_bf16(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline F load_bf16(const uint16_t* p) {
  return {widen_bf16(_mm_loadu_si128((const __m128i*)p)), widen_bf16(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline F bf16_first(const uint8_t* line) {
  W w = load_line(line);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
}
inline F bf16_second(const uint8_t* line) {
  W w = load_line(line);
  __m256i mask = _mm256_set1_epi32((int)0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(w.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(w.b, mask))};
}

inline float sum(F x) {
  __m256 b = _mm256_add_ps(x.a, x.b);
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float largest(F x) {
  __m256 b = _mm256_max_ps(x.a, x.b);
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

}  // namespace MDI_NS
