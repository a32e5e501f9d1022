#define MDI_NS mdi_avx512
#define MDI_NAME "avx512"
#define MDI_TABLE kAvx512
#include "vec_avx512.h"
#include "isa_body.h"
