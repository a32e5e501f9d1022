#define MDI_NS mdi_neon_dot
#define MDI_NAME "neon_dot"
#define MDI_TABLE kNeonDot
#define MDI_DOT
#include "vec_neon.h"
#include "isa_body.h"
