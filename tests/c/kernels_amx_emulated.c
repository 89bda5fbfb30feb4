// SPDX-License-Identifier: MIT
// kernels_amx_emulated.c - the AMX kernels for processors that have AVX-512 VNNI but not AMX: the same source with tile
// instructions in plain C. The tests compare its bits with those of every other table.
#undef LLAMAC_NO_AMX   // which leaves out the core's own table
#define KERNELS kernels_amx_emulated
#define KERNELS_NAME "amx_emulated"
#define EMULATED_TILES "emulated_tiles.h"
#include "kernels_amx.c"
