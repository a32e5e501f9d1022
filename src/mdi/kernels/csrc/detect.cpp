// Which instruction sets this processor and its system can run, best first.
#include "isa.h"

#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>

static bool system_saves(unsigned mask) {  // XGETBV: the system keeps these registers when it switches processes
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & mask) == mask;
}

#if defined(MDI_HAS_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

static bool may_use_tiles() {  // Linux gives the registers of the matrix unit only to who asks; threads inherit it
  const long ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, ask, tile_data) == 0;
}
#endif

std::vector<const InstructionSet*> instruction_sets() {
  std::vector<const InstructionSet*> found;
  unsigned a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE) && (c & bit_FMA) && (c & bit_F16C) && system_saves(6)) {
    unsigned b7 = 0, c7 = 0, d7 = 0, a71 = 0;
    __get_cpuid_count(7, 0, &a, &b7, &c7, &d7);
    if (a >= 1) {
      unsigned b71, c71, d71;
      __get_cpuid_count(7, 1, &a71, &b71, &c71, &d71);
    }
    [[maybe_unused]] const unsigned avx512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
#if defined(MDI_HAS_AMX) && defined(__linux__)
    const unsigned amx = (1u << 24) | (1u << 25);  // tiles, and products of bytes
    if ((b7 & avx512) == avx512 && (c7 & bit_AVX512VNNI) && (d7 & amx) == amx && system_saves(0x600e6) && may_use_tiles())
      found.push_back(kAmx);
#endif
#ifdef MDI_HAS_AVX512
    if ((b7 & avx512) == avx512 && (c7 & bit_AVX512VNNI) && system_saves(0xe6)) found.push_back(kAvx512);
#endif
#ifdef MDI_HAS_AVX2VNNI
    if ((b7 & bit_AVX2) && (a71 & (1u << 4))) found.push_back(kAvx2Vnni);
#endif
#ifdef MDI_HAS_AVX2
    if (b7 & bit_AVX2) found.push_back(kAvx2);
#endif
  }
  found.push_back(kPlain);
  return found;
}

#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#ifdef MDI_HAS_NEON_I8MM
static bool has_matrix_products() {  // of bytes: i8mm
#if defined(__linux__)
  return getauxval(AT_HWCAP2) & 1ul << 13;  // HWCAP2_I8MM
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
#endif

std::vector<const InstructionSet*> instruction_sets() {
  std::vector<const InstructionSet*> found;
#ifdef MDI_HAS_NEON_I8MM
  if (has_matrix_products()) found.push_back(kNeonI8mm);
#endif
#ifdef MDI_HAS_NEON_DOT
#if defined(__linux__)
  const unsigned long has_dot_product = 1ul << 20;  // HWCAP_ASIMDDP
  if (getauxval(AT_HWCAP) & has_dot_product) found.push_back(kNeonDot);
#elif defined(__APPLE__)
  found.push_back(kNeonDot);  // all of Apple's 64-bit processors that run macOS
#endif
#endif
#ifdef MDI_HAS_NEON
  found.push_back(kNeon);
#endif
  found.push_back(kPlain);
  return found;
}

#else
std::vector<const InstructionSet*> instruction_sets() { return {kPlain}; }
#endif
