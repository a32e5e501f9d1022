// Products per cycle of the tiles of one instruction set, from the second cache: a line "format rows rate" for each.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define MDI_NS mdi_cycles
#define MDI_NAME "cycles"
#define MDI_TABLE kCycles
#include MDI_VECTORS
#include "isa_body.h"

using namespace mdi_cycles;

static double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double clock_hz() {  // from a chain of multiplications of whole numbers, three cycles each
  double best = 1e9;
  for (int t = 0; t < 200; t++) {
    uint64_t x = 3;
    double begin = seconds();
    for (int i = 0; i < 20000; i++) asm volatile("imul %0, %0" : "+r"(x));
    double s = (seconds() - begin) / 20000;
    if (s < best) best = s;
  }
  return 3 / best;
}

int main() {
  const int n_in = 2048, n_out = 128;
  const struct { const char* name; int format, inputs, lines; } forms[] = {
      {"int8", kInt8, 128, 33}, {"int4", kInt4, 64, 9}, {"mxfp4", kMxfp4, 128, 17}, {"bf16", kBf16, 2, 1}, {"float32", kFloat32, 1, 1}};
  const double hz = clock_hz();
  for (auto& form : forms) {
    size_t n_bytes = (size_t)(n_out / 16) * (n_in / form.inputs) * form.lines * 64;
    uint8_t* data = (uint8_t*)std::aligned_alloc(64, n_bytes + 8192);
    for (size_t i = 0; i < n_bytes / 4; i++) ((uint32_t*)data)[i] = form.format >= kInt8 ? 0x11213141 : 0x3c003c00;
    MdiMatrix w = {data, nullptr, form.format, n_out, n_in, 0};
    for (int n = 1; n <= tile_rows(form.format); n++) {
      std::vector<float> x((size_t)n * n_in), rows_of_floats(x.size()), y((size_t)n * n_out);
      for (auto& a : x) a = (float)std::rand() / (float)RAND_MAX - 0.5f;
      ByteRows bytes;
      bytes.reserve(n, n_in, tile_rows(form.format));
      for (int m = 0; m < n; m++) {
        quantize_row(&x[(size_t)m * n_in], m, bytes);
        interleave_row(&x[(size_t)m * n_in], m, n, n_in, tile_rows(form.format), rows_of_floats.data());
      }
      Rows rows{n, rows_of_floats.data(), &bytes};
      double products = (double)n * n_in * n_out, best = 1e9;
      int repeats = 1 + (int)(20e6 / products);
      for (int t = 0; t < 100; t++) {
        double begin = seconds();
        for (int r = 0; r < repeats; r++) multiply_panels(w, 0, n_out / 16, rows, Out{y.data(), n_out});
        double s = (seconds() - begin) / repeats;
        if (s < best) best = s;
      }
      std::printf("%s %d %.2f\n", form.name, n, products / best / hz);
    }
    std::free(data);
  }
}
