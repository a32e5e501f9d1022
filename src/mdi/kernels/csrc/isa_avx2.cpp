#define MDI_NS mdi_avx2
#define MDI_NAME "avx2"
#define MDI_TABLE kAvx2
#include "vec_avx2.h"
#include "isa_body.h"
