// What blocks.h has for nine rows and more on Intel's matrix unit.
#pragma once

namespace MDI_NS {

// As kHalfTiles of amx.h, of groups of 16.
alignas(64) static const TileShapes kQuarterTiles = {1, 0, {}, {64, 64, 16, 16, 64, 64}, {16, 16, 16, 16, 4, 4}};

struct MatrixUnit {
  bool is_used;
  MatrixUnit(bool use, int group_inputs) : is_used(use) {
    if (is_used) _tile_loadconfig(group_inputs == 32 ? &kHalfTiles : &kQuarterTiles);
  }
  ~MatrixUnit() {
    if (is_used) _tile_release();
  }
};

// totals (16, kBytePanels, 16) += products of the rows from m on with up to 256 inputs of panels side by side.
template <int kGroupInputs, bool kHasMinimum>
void matrix_chunk(const Decoded* w, int n_steps, const ByteRows& x, int m0, int first_step, int offset, float* totals) {
  constexpr int kGroupsOfStep = 64 / kGroupInputs, kLines = kGroupInputs / 4;
  alignas(64) int32_t sums[kGroupsOfStep][16 * kMatrixBlock];
  for (int step = 0; step < n_steps; step++) {
    int64_t at = first_step + step;
    const int8_t* q = x.bytes(m0) + at * 64 * kMatrixBlock;
    const float *scale = x.scales(m0) + at * kMatrixBlock, *float_sums = x.float_sums(m0) + at * 2 * kMatrixBlock;
    const int32_t* row_sums = (kGroupInputs == 32 ? x.sums(m0) : x.quarters(m0)) + at * kGroupsOfStep * kMatrixBlock;
    for (int p = 0; p < kBytePanels; p++) {
      for (int g = 0; g < kGroupsOfStep; g += 2) {
        const uint8_t* line = w[p].line[16 * step + kLines * g];
        _tile_zero(0);
        _tile_loadd(2, q + kGroupInputs * g, 64);
        _tile_loadd(4, line, 64);
        _tile_dpbsud(0, 2, 4);
        _tile_zero(1);
        _tile_loadd(3, q + kGroupInputs * (g + 1), 64);
        _tile_loadd(5, line + 64 * kLines, 64);
        _tile_dpbsud(1, 3, 5);
        _tile_stored(0, sums[g], 64);
        _tile_stored(1, sums[g + 1], 64);
      }
      for (int m = 0; m < kMatrixBlock; m++) {
        F part = splat(0.0f);
        for (int g = 0; g < kGroupsOfStep; g++) {
          F a = shifted(sums[g], m, offset * row_sums[g * kMatrixBlock + m]);
          part = fma(a, load(w[p].scale[step * kGroupsOfStep + g]), part);
          if constexpr (kHasMinimum)
            part = fma(load(w[p].more[step * kGroupsOfStep + g]), splat(float_sums[g * kMatrixBlock + m]), part);
        }
        float* total = totals + 16 * (m * kBytePanels + p);
        store(total, fma(part, splat(scale[m]), load(total)));
      }
    }
  }
}

}  // namespace MDI_NS
