/* Tile registers of AMX in plain C, for machines without them. Each thread has its own. A tile may
   be used only after its shape is set and before it is freed: otherwise the process aborts, as on a
   processor. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint8_t palette, start, zeros[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} StandInShape;

static __thread StandInShape stand_in_shape;
static __thread unsigned char stand_in_tile[8][16][64];

static void stand_in_check(int t) {
    if (stand_in_shape.palette != 1 || t > 7 || stand_in_shape.bytes[t] != 64 ||
        stand_in_shape.rows[t] != 16)
        abort();
}

static void stand_in_load(int t, const void *from, int64_t stride) {
    stand_in_check(t);
    for (int r = 0; r < 16; r++) memcpy(stand_in_tile[t][r], (const char *)from + r * stride, 64);
}

static void stand_in_store(int t, void *to, int64_t stride) {
    stand_in_check(t);
    for (int r = 0; r < 16; r++) memcpy((char *)to + r * stride, stand_in_tile[t][r], 64);
}

static float stand_in_number(const unsigned char *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* TDPBF16PS: sums[m][n] += a[m][2k] b[k][2n] + a[m][2k + 1] b[k][2n + 1]. */
static void stand_in_multiply(int sums, int a, int b) {
    stand_in_check(sums), stand_in_check(a), stand_in_check(b);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            float s;
            memcpy(&s, stand_in_tile[sums][m] + 4 * n, 4);
            for (int k = 0; k < 16; k++)
                for (int i = 0; i < 2; i++)
                    s += stand_in_number(stand_in_tile[a][m] + 4 * k + 2 * i) *
                         stand_in_number(stand_in_tile[b][k] + 4 * n + 2 * i);
            memcpy(stand_in_tile[sums][m] + 4 * n, &s, 4);
        }
}

static void stand_in_free(void) { memset(&stand_in_shape, 0, sizeof(stand_in_shape)); }

#define ALLOW_TILES() 1
#define SHAPE_TILES(shape) memcpy(&stand_in_shape, shape, sizeof(stand_in_shape))
#define LOAD_TILE(t, from, stride) stand_in_load(t, from, stride)
#define STORE_TILE(t, to, stride) stand_in_store(t, to, stride)
#define MULTIPLY_TILES(sums, a, b) stand_in_multiply(sums, a, b)
#define FREE_TILES() stand_in_free()
