#define MDI_NS mdi_plain
#define MDI_NAME "plain"
#define MDI_TABLE kPlain
#include "vec_plain.h"
#include "isa_body.h"
