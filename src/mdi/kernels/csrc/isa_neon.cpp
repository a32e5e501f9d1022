#define MDI_NS mdi_neon
#define MDI_NAME "neon"
#define MDI_TABLE kNeon
#include "vec_neon.h"
#include "isa_body.h"
