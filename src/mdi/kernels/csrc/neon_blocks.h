// What blocks.h has for other processors, for NEON: lines are signed bytes.
#pragma once

namespace MDI_NS {

#define MDI_INLINE __attribute__((always_inline))

// totals: until the last chunk of a panel in the order of `total`, then (kRows, 16).
template <int kRows, int kGroupInputs, bool kHasMinimum, int kNarrow>
void multiply_chunk(const Decoded* w, int n_steps, const ChunkRows& x, int, float* totals, bool is_last) {
  constexpr int n_vectors = kVectors<kRows>, n_columns = kColumns<kRows>, n_groups = 64 / kGroupInputs;
  static_assert(n_vectors == kRows);
  V total[4][n_vectors];
  unrolled<4>([&](auto c) MDI_INLINE {
    unrolled<n_vectors>([&](auto v) MDI_INLINE { total[c][v] = vld1q_f32(totals + 4 * (c * n_vectors + v)); });
  });
  const int8_t* q = x.q;
  const float *scale = x.scale, *float_sums = x.float_sums;
  int n = x.n;
  for (int step = 0; step < n_steps; step++, q += 64 * n, scale += n, float_sums += 2 * n) {
    unrolled<4 / n_columns>([&](auto several) MDI_INLINE {
      constexpr int first = several * n_columns;
      V part[n_columns][n_vectors];
      unrolled<n_columns>([&](auto c) MDI_INLINE {
        unrolled<n_vectors>([&](auto v) MDI_INLINE { part[c][v] = vdupq_n_f32(0.0f); });
      });
      for (int g = 0; g < n_groups; g++) {
        N sum[n_columns][n_vectors];
        unrolled<n_columns>([&](auto c) MDI_INLINE {
          unrolled<n_vectors>([&](auto v) MDI_INLINE { sum[c][v] = vdupq_n_s32(kBegin); });
        });
        add_group<kRows, -kGroupInputs, n_columns, false>(w->line[16 * step + kGroupInputs / 4 * g] + 16 * first,
                                                          q + kGroupInputs * g * n, n, sum);
        unrolled<n_columns>([&](auto c) MDI_INLINE {
          int at = 4 * (first + c);
          V of_column = vld1q_f32(w->scale[step * n_groups + g] + at);
          unrolled<n_vectors>([&](auto v) MDI_INLINE {
            part[c][v] = vfmaq_f32(part[c][v], sum_to_float(sum[c][v]), of_weights<kRows, v>(of_column));
          });
          if constexpr (kHasMinimum) {
            V more = vld1q_f32(w->more[step * n_groups + g] + at);
            unrolled<n_vectors>([&](auto v) MDI_INLINE {
              part[c][v] = vfmaq_f32(part[c][v], of_weights<kRows, v>(more), of_rows<kRows, v>(float_sums + g * n));
            });
          }
        });
      }
      unrolled<n_columns>([&](auto c) MDI_INLINE {
        unrolled<n_vectors>([&](auto v) MDI_INLINE {
          total[first + c][v] = vfmaq_f32(total[first + c][v], part[c][v], of_rows<kRows, v>(scale));
        });
      });
    });
  }
  if (is_last)
    unrolled<kRows>([&](auto m) MDI_INLINE { store(totals + 16 * m, row_of<kRows, m>(total)); });
  else
    unrolled<4>([&](auto c) MDI_INLINE {
      unrolled<n_vectors>([&](auto v) MDI_INLINE { vst1q_f32(totals + 4 * (c * n_vectors + v), total[c][v]); });
    });
}

#undef MDI_INLINE
}  // namespace MDI_NS
