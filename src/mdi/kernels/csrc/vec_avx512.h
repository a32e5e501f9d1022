// Sixteen lanes in one AVX-512 register. The four vec_*.h have the same names and give the same bits.
#pragma once
#include <immintrin.h>

#include <cstdint>

#define MDI_ONE_ROW  // blocks.h has a function of its own for one row

namespace MDI_NS {

struct F { __m512 v; };   // sixteen floats
struct I { __m512i v; };  // sixteen int32
struct W { __m512i v; };  // a line of 64 bytes: four unsigned weights for each lane

// Rows of activations that share the weights of a line while these are in registers.
constexpr int tile_rows(int) { return 8; }  // of any format
constexpr int kFloatPanels = 2;     // panels side by side in such a tile
constexpr int kBytePanels = 2;   // the same where weights are bytes
constexpr int kPiece = 4;        // inputs of a row that lie together in its block
constexpr int kUnrolled = 16;    // lines of bytes whose products stand one after the other in the code
constexpr int kSums = 16;        // sums of attention that stay in registers
constexpr bool kDotIsUnsigned = true;  // dot() takes bytes of int8 weights with their offset of 128
constexpr int narrow_lines(int) { return 0; }  // whose products a narrower sum (H) holds, of blocks of so many bits; 0: it has none

inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F splat(float x) { return {_mm512_set1_ps(x)}; }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c, rounded once
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F round(F a) { return {_mm512_roundscale_ps(a.v, 0)}; }  // to the nearest, ties to even
inline F choose_greater(F a, F b, F x, F y) {  // a > b ? x : y
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), y.v, x.v)};
}
inline F first_lanes(F a, int n, F other) {  // lanes below n of a, the others of `other`
  return {_mm512_mask_blend_ps((__mmask16)((1u << n) - 1), other.v, a.v)};
}

inline I splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // to the nearest, ties to even
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F power_of_two(I n) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))}; }
inline void store_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }  // lanes within a byte
inline F load_bytes(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
inline int32_t sum_int(I a) { return _mm512_reduce_add_epi32(a.v); }

inline W load_line(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline W int8_line(const uint8_t* p) { return load_line(p); }
inline W low_halves(W a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline W high_halves(W a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
inline W looked_up(W a, const uint8_t* table) {  // table[a], of bytes below 16
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)), a.v)};
}
template <int kRight> inline W bits_of(W a, int mask) {  // (a >> kRight) & mask of each byte; of a mask without what comes from the next
  if constexpr (kRight < 0) return {_mm512_and_si512(_mm512_slli_epi16(a.v, -kRight), _mm512_set1_epi8((char)mask))};
  else return {_mm512_and_si512(_mm512_srli_epi16(a.v, kRight), _mm512_set1_epi8((char)mask))};
}
inline W either(W a, W b) { return {_mm512_or_si512(a.v, b.v)}; }
inline W less(W a, int n) { return {_mm512_sub_epi8(a.v, _mm512_set1_epi8((char)n))}; }  // of each byte
inline void store_line(uint8_t* p, W a) { _mm512_storeu_si512(p, a.v); }
// Each lane adds the products of its four weights with the same four signed bytes.
inline I dot(I sum, W w, const int8_t* x) { return {_mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(*(const int32_t*)x))}; }
// Sums of a group of halves of bytes begin with a whole number; a set of instructions may add them in a narrower form first.
using H = I;
inline H begin_halves(int32_t start) { return splat_int(start); }
inline H dot_halves(H sum, W w, const int8_t* x) { return dot(sum, w, x); }
inline I end_halves(H sum, I) { return sum; }
constexpr int kMxfp4Lines = 4;  // of a group whose products such a sum holds
inline F byte_of_lane(const uint8_t* line, int shift, int mask) {  // (word of each lane >> shift) & mask
  __m512i word = _mm512_srl_epi32(_mm512_loadu_si512(line), _mm_cvtsi32_si128(shift));
  return {_mm512_cvtepi32_ps(_mm512_and_si512(word, _mm512_set1_epi32(mask)))};
}

inline F load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void store_half(uint16_t* p, F a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, 0)); }
inline F load_exponents(const uint8_t* p) {  // 2^(e - 127) of sixteen bytes; 0 for 0, infinity for 255
  __m128i e = _mm_loadu_si128((const __m128i*)p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(e), 23))};
}
inline F load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// A line of bfloat16 holds two inputs of each lane.
inline F bf16_first(const uint8_t* line) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(line), 16))}; }
inline F bf16_second(const uint8_t* line) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(line), _mm512_set1_epi32((int)0xffff0000)))};
}

// Sums and maxima of all lanes, in the same order everywhere: lanes i and i + 8, then i and i + 4, and so on.
inline float sum(F a) {
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline float largest(F a) { return _mm512_reduce_max_ps(a.v); }

inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

}  // namespace MDI_NS
