#define MDI_NS mdi_neon_i8mm
#define MDI_NAME "neon_i8mm"
#define MDI_TABLE kNeonI8mm
#define MDI_DOT
#define MDI_I8MM
#include "vec_neon.h"
#include "isa_body.h"
