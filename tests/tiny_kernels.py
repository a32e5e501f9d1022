"""A few lines of C++ with the file names and the interface of the real kernels, which compile at once."""

from __future__ import annotations

from pathlib import Path

API = """
#include <cstring>
static const char* const names[] = {
#ifdef MDI_HAS_AVX512
  "avx512",
#endif
#ifdef MDI_HAS_AVX2
  "avx2",
#endif
#ifdef MDI_HAS_NEON
  "neon",
#endif
  "plain"};
static const char* chosen = names[0];
#define API extern "C" __attribute__((visibility("default")))
API const char* mdi_instruction_set() { return chosen; }
API int mdi_force(const char* name) {
  for (const char* have : names)
    if (std::strcmp(have, name) == 0) { chosen = have; return 0; }
  return -1;
}
"""
UNIT = '#include "stage.h"\nfloat NAME(float x) { return twice(x); }\n'
SELFTEST = '#include <cstdio>\nint main() { std::puts("tiny 0"); }\n'


def write_tiny_kernels(csrc: Path) -> None:
    csrc.mkdir(parents=True)
    (csrc / "stage.h").write_text("inline float twice(float x) { return 2 * x; }\n")
    (csrc / "api.cpp").write_text(API)
    (csrc / "selftest.cpp").write_text(SELFTEST)
    for name in ("avx512", "avx2", "neon", "plain"):
        (csrc / f"isa_{name}.cpp").write_text(UNIT.replace("NAME", name))
