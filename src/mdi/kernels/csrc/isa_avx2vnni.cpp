#define MDI_NS mdi_avx2vnni
#define MDI_NAME "avx2vnni"
#define MDI_TABLE kAvx2Vnni
#define MDI_VNNI
#include "vec_avx2.h"
#include "isa_body.h"
