#define MDI_NS mdi_amx
#define MDI_NAME "amx"
#define MDI_TABLE kAmx
#define MDI_AMX
#include "vec_avx512.h"
#include "isa_body.h"
