/* The loop over time for one number type, REAL. Included by loop.c.
 * Order: products, noise, cells, norms, memory layout, forward pass, backward pass. */

#define LANES ((int64_t)(VECTOR_BYTES / sizeof(REAL)))
#define TILE (LANES * TILE_VECTORS) /* columns of a packed panel */
#define DEPTH 1024                  /* depth of a product at a time, so that a part of a panel stays in the cache */
#define PIECE 64                    /* the same if the panel is packed during the product */
#define BLOCK_ROWS 128              /* rows of a large product at a time, so that they stay in the cache */
#define CHUNK 256                   /* units of a row at a time, so that their masks and slots stay in the cache */
#define SUM_DEPTH 192               /* outer products at a time: a panel of that depth stays in the first cache */
#define SUM_ROWS (16 * TILE_ROWS)   /* rows and columns of their sum at a time, so that it stays in the second cache */
#define SUM_COLUMNS (12 * LANES)    /* a multiple of TILE */

typedef REAL NAME(vec) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL))));
#define VEC NAME(vec)

/* --- products ------------------------------------------------------------------------------------ */

/* Panels have TILE columns, except the last, which has as many vectors as it needs. */
INLINE int64_t NAME(panel_size)(int64_t k, int64_t n) { return (n + LANES - 1) / LANES * LANES * k; }
INLINE int64_t NAME(panel_width)(int64_t n, int64_t panel) {
    return min64(TILE, (n - panel * TILE + LANES - 1) / LANES * LANES);
}

/* out[i][j] = w[i + j * sn], for LANES rows and columns. */
INLINE void NAME(transpose)(REAL *out, int64_t width, const REAL *w, int64_t sn) {
#ifdef SHUFFLE
    VEC rows[LANES], next[LANES];
    for (int j = 0; j < LANES; j++) rows[j] = *(const VEC *)(w + j * sn);
    for (int stage = 1; stage < LANES; stage *= 2) {
        for (int j = 0; j < LANES / 2; j++) {
            next[2 * j] = SHUFFLE(rows[j], rows[j + LANES / 2], LOW);
            next[2 * j + 1] = SHUFFLE(rows[j], rows[j + LANES / 2], HIGH);
        }
        memcpy(rows, next, sizeof(rows));
    }
    for (int i = 0; i < LANES; i++) *(VEC *)(out + i * width) = rows[i];
#else
    for (int j = 0; j < LANES; j++)
        for (int i = 0; i < LANES; i++) out[i * width + j] = w[i + j * sn];
#endif
}

/* b[k][n] = w[k * sk + n * sn], with `cols` columns, padded with zeros to [k][width]. */
static void NAME(pack_panel)(REAL *out, const REAL *w, int64_t k, int64_t cols, int64_t width, int64_t sk, int64_t sn) {
    if (cols < width) memset(out, 0, sizeof(REAL) * width * k);
    if (sn == 1) {
        for (int64_t i = 0; i < k; i++) memcpy(out + i * width, w + i * sk, sizeof(REAL) * cols);
        return;
    }
    for (int64_t i0 = 0; i0 < k; i0 += PIECE)
        for (int64_t j0 = 0; j0 < cols; j0 += LANES) {
            int64_t i = i0, i1 = min64(k, i0 + PIECE), j1 = min64(cols, j0 + LANES);
            for (; sk == 1 && j0 + LANES <= cols && i + LANES <= i1; i += LANES)
                NAME(transpose)(out + i * width + j0, width, w + i + j0 * sn, sn);
            for (; i < i1; i++)
                for (int64_t j = j0; j < j1; j++) out[i * width + j] = w[i * sk + j * sn];
        }
}

/* Pack all columns into panels; each thread packs its share of the panels. */
static void NAME(pack)(REAL *packed, const REAL *w, int64_t k, int64_t n, int64_t sk, int64_t sn) {
    int64_t from, to;
    share((n + TILE - 1) / TILE, 1, &from, &to);
    for (int64_t panel = from; panel < to; panel++)
        NAME(pack_panel)(packed + panel * TILE * k, w + panel * TILE * sn, k, min64(TILE, n - panel * TILE),
                         NAME(panel_width)(n, panel), sk, sn);
}

/* c[m][n] = a[m * lda + k * step] · b, for `rows` rows and one panel of b. */
INLINE void NAME(tile)(int rows, int vectors, int64_t k, const REAL *a, int64_t lda, int64_t step, const REAL *b, REAL *c,
                       int64_t ldc, int add) {
    VEC sum[TILE_ROWS][TILE_VECTORS];
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < vectors; v++)
            sum[m][v] = add == FIRST ? *(const VEC *)(c + m * ldc + v * LANES) : (VEC){0};
    for (int64_t i = 0; i < k; i++) {
        VEC row[TILE_VECTORS];
        for (int v = 0; v < vectors; v++) row[v] = *(const VEC *)(b + (i * vectors + v) * LANES);
        for (int m = 0; m < rows; m++) {
            VEC one = a[m * lda + i * step] - (VEC){0};
            for (int v = 0; v < vectors; v++) sum[m][v] += one * row[v];
        }
    }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < vectors; v++) {
            VEC *to = (VEC *)(c + m * ldc + v * LANES);
            *to = add == LAST ? *to + sum[m][v] : sum[m][v];
        }
}

#define TILE_OF(vectors)                                                                                             \
    static void NAME(tile_##vectors)(int64_t rows, int64_t k, const REAL *a, int64_t lda, const REAL *b, REAL *c,     \
                                     int64_t ldc, int add) {                                                         \
        for (; rows >= TILE_ROWS; rows -= TILE_ROWS, a += TILE_ROWS * lda, c += TILE_ROWS * ldc)                     \
            NAME(tile)(TILE_ROWS, vectors, k, a, lda, 1, b, c, ldc, add);                                               \
        if (rows >= 4) {                                                                                             \
            NAME(tile)(4, vectors, k, a, lda, 1, b, c, ldc, add);                                                       \
            rows -= 4, a += 4 * lda, c += 4 * ldc;                                                                   \
        }                                                                                                            \
        if (rows >= 2) {                                                                                             \
            NAME(tile)(2, vectors, k, a, lda, 1, b, c, ldc, add);                                                       \
            rows -= 2, a += 2 * lda, c += 2 * ldc;                                                                   \
        }                                                                                                            \
        if (rows) NAME(tile)(1, vectors, k, a, lda, 1, b, c, ldc, add);                                                 \
    }
TILE_OF(1)
TILE_OF(2)
#if TILE_VECTORS == 3
TILE_OF(3)
#endif

static void NAME(tiles)(int64_t width, int64_t rows, int64_t k, const REAL *a, int64_t lda, const REAL *b, REAL *c,
                        int64_t ldc, int add) {
    if (width == LANES)
        NAME(tile_1)(rows, k, a, lda, b, c, ldc, add);
    else if (width == 2 * LANES)
        NAME(tile_2)(rows, k, a, lda, b, c, ldc, add);
#if TILE_VECTORS == 3
    else
        NAME(tile_3)(rows, k, a, lda, b, c, ldc, add);
#endif
}

/* c[m][n] (+)= a[m][k] · b; each thread computes its share of the tiles. b is `packed`. If that is NULL, the needed parts
 * of w, in the layout that `pack` takes, are packed during the product. Each element of c is summed in the order of k.
 * Its bits therefore depend neither on the other rows nor on how the tiles are shared. */
static void NAME(product_of)(int64_t m, int64_t k, int64_t n, const REAL *a, int64_t lda, const REAL *packed,
                             const REAL *w, int64_t sk, int64_t sn, REAL *c, int64_t ldc, int add) {
    int64_t blocks = (m + TILE_ROWS - 1) / TILE_ROWS, panels = (n + TILE - 1) / TILE, from, to;
    REAL edge[TILE_ROWS * TILE], piece[PIECE * TILE] __attribute__((aligned(64)));
    share(blocks * panels, 1, &from, &to);
    for (int64_t task = from; task < to;) {
        int64_t panel = task / blocks, first = task % blocks, last = min64(blocks, first + to - task);
        int64_t width = NAME(panel_width)(n, panel), cols = min64(TILE, n - panel * TILE);
        int64_t row = first * TILE_ROWS, rows = min64(last * TILE_ROWS, m) - row;
        for (int64_t k0 = 0, depth; k0 < k; k0 += depth) {
            depth = min64(packed ? DEPTH : PIECE, k - k0);
            const REAL *b = packed ? packed + panel * TILE * k + k0 * width : piece, *left = a + row * lda + k0;
            if (!packed) NAME(pack_panel)(piece, w + panel * TILE * sn + k0 * sk, depth, cols, width, sk, sn);
            REAL *out = c + row * ldc + panel * TILE;
            int more = add || k0 > 0;
            if (cols == width) {
                NAME(tiles)(width, rows, depth, left, lda, b, out, ldc, more);
                continue;
            }
            for (int64_t done = 0; done < rows; done += TILE_ROWS) { /* a vector would write past the row */
                int64_t some = min64(TILE_ROWS, rows - done);
                for (int64_t r = 0; more && r < some; r++) {
                    memset(edge + r * width, 0, sizeof(REAL) * width);
                    memcpy(edge + r * width, out + (done + r) * ldc, sizeof(REAL) * cols);
                }
                NAME(tiles)(width, some, depth, left + done * lda, lda, b, edge, width, more);
                for (int64_t r = 0; r < some; r++)
                    memcpy(out + (done + r) * ldc, edge + r * width, sizeof(REAL) * cols);
            }
        }
        task += last - first;
    }
}

static void NAME(product)(int64_t m, int64_t k, int64_t n, const REAL *a, int64_t lda, const REAL *packed, REAL *c,
                          int64_t ldc, int add) {
    NAME(product_of)(m, k, n, a, lda, packed, NULL, 0, 0, c, ldc, add);
}

/* A product of many rows at once: c[m][n] = a[m][k] · b with b[k][n] = w[k * sk + n * sn]. `packed` has room for
 * zoneout_packed_size numbers; few rows need none. */
int64_t NAME(zoneout_packed_size)(int64_t m, int64_t k, int64_t n) {
    return m > BLOCK_ROWS ? NAME(panel_size)(k, n) : 0;
}

typedef struct {
    int64_t m, k, n, sk, sn;
    const REAL *a, *w;
    REAL *c, *packed;
} NAME(Product);

static void NAME(product_task)(void *arguments) {
    const NAME(Product) p = *(const NAME(Product) *)arguments;
    if (p.m <= BLOCK_ROWS) {
        NAME(product_of)(p.m, p.k, p.n, p.a, p.k, NULL, p.w, p.sk, p.sn, p.c, p.n, 0);
        return;
    }
    NAME(pack)(p.packed, p.w, p.k, p.n, p.sk, p.sn);
    barrier();
    for (int64_t row = 0; row < p.m; row += BLOCK_ROWS)
        NAME(product)(min64(BLOCK_ROWS, p.m - row), p.k, p.n, p.a + row * p.k, p.k, p.packed, p.c + row * p.n, p.n, 0);
}

void NAME(zoneout_product)(int64_t m, int64_t k, int64_t n, const REAL *a, const REAL *w, int64_t sk, int64_t sn, REAL *c,
                           REAL *packed, int64_t threads) {
    NAME(Product) p = {m, k, n, sk, sn, a, w, c, packed};
    in_threads(m * k * n < 1 << 16 ? 1 : threads, NAME(product_task), &p);
}

/* --- sums of outer products: the gradients of matrices ------------------------------------------- */

/* c[m][n] (+)= the sum over k of a[k][m] · b[k][n]. `work` has room for zoneout_sum_size numbers. */
typedef struct {
    int64_t m, k, n, lda, ldb, ldc, add, threads;
    const REAL *a, *b;
    REAL *c, *work;
} NAME(Sum);

#define SUM_WORK (SUM_DEPTH * (SUM_ROWS + TILE) + TILE_ROWS * TILE) /* numbers of a thread */

int64_t NAME(zoneout_sum_size)(int64_t threads) { return threads * SUM_WORK + 64 / (int64_t)sizeof(REAL); }

/* out[i][width] = v[i * ld], with `cols` numbers a row, padded with zeros. */
INLINE void NAME(copy_columns)(REAL *out, const REAL *v, int64_t ld, int64_t k, int64_t cols, int64_t width) {
    for (int64_t i = 0; i < k; i++) {
        for (int64_t j = 0; j < cols; j++) out[i * width + j] = v[i * ld + j];
        for (int64_t j = cols; j < width; j++) out[i * width + j] = 0;
    }
}

INLINE void NAME(sum_tile)(int64_t vectors, int64_t k, const REAL *a, const REAL *b, REAL *c, int64_t ldc, int add) {
    if (vectors == 1)
        NAME(tile)(TILE_ROWS, 1, k, a, 1, TILE_ROWS, b, c, ldc, add);
    else if (vectors == 2)
        NAME(tile)(TILE_ROWS, 2, k, a, 1, TILE_ROWS, b, c, ldc, add);
#if TILE_VECTORS == 3
    else
        NAME(tile)(TILE_ROWS, 3, k, a, 1, TILE_ROWS, b, c, ldc, add);
#endif
}

/* Add the outer products [k0, k0 + k) to `rows` rows and `cols` columns of c. */
static void NAME(sum_block)(const REAL *a, int64_t lda, const REAL *b, int64_t ldb, int64_t k, int64_t rows, int64_t cols,
                            REAL *c, int64_t ldc, REAL *work, int add) {
    REAL *left = work, *right = left + SUM_DEPTH * SUM_ROWS, *edge = right + SUM_DEPTH * TILE;
    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        if (rows - r >= TILE_ROWS)
            NAME(copy_columns)(left + r * SUM_DEPTH, a + r, lda, k, TILE_ROWS, TILE_ROWS);
        else
            NAME(copy_columns)(left + r * SUM_DEPTH, a + r, lda, k, rows - r, TILE_ROWS);
    }
    for (int64_t j = 0; j < cols; j += TILE) {
        int64_t some = min64(TILE, cols - j), width = NAME(panel_width)(cols, j / TILE), vectors = width / LANES;
        if (some == TILE)
            NAME(copy_columns)(right, b + j, ldb, k, TILE, TILE);
        else
            NAME(copy_columns)(right, b + j, ldb, k, some, width);
        for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            const REAL *of_rows = left + r * SUM_DEPTH;
            REAL *out = c + r * ldc + j;
            if (some == width && rows - r >= TILE_ROWS) {
                NAME(sum_tile)(vectors, k, of_rows, right, out, ldc, add);
                continue;
            }
            NAME(sum_tile)(vectors, k, of_rows, right, edge, TILE, REPLACED);
            for (int64_t m = 0; m < min64(TILE_ROWS, rows - r); m++)
                for (int64_t n = 0; n < some; n++)
                    out[m * ldc + n] = add == LAST ? out[m * ldc + n] + edge[m * TILE + n] : edge[m * TILE + n];
        }
    }
}

/* Each element is summed in the same order for any number of threads. */
static void NAME(sum_task)(void *arguments) {
    const NAME(Sum) *s = arguments;
    int64_t across = (s->n + SUM_COLUMNS - 1) / SUM_COLUMNS, rows = SUM_ROWS, from, to;
    while (rows > TILE_ROWS && (s->m + rows - 1) / rows * across < 2 * thread_count()) rows /= 2;
    rows = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    REAL *work = (REAL *)(((intptr_t)s->work + 63) / 64 * 64) + thread_id() * SUM_WORK;
    share((s->m + rows - 1) / rows * across, 1, &from, &to);
    for (int64_t task = from; task < to; task++) {
        int64_t row = task / across * rows, column = task % across * SUM_COLUMNS;
        for (int64_t k = 0; k < s->k; k += SUM_DEPTH)
            NAME(sum_block)(s->a + k * s->lda + row, s->lda, s->b + k * s->ldb + column, s->ldb, min64(SUM_DEPTH, s->k - k),
                            min64(rows, s->m - row), min64(SUM_COLUMNS, s->n - column), s->c + row * s->ldc + column, s->ldc,
                            work, s->add || k ? LAST : REPLACED);
    }
}

void NAME(zoneout_sum)(NAME(Sum) *s) { in_threads(s->m * s->k * s->n < 1 << 16 ? 1 : s->threads, NAME(sum_task), s); }

/* --- noise --------------------------------------------------------------------------------------- */

/* Masks: 1 where the old value (or zero) replaces the new value. At evaluation, the probability of that. */
typedef struct {
    REAL state[STATES][CHUNK], update[CHUNK];
} NAME(Keep);
#define KEEP NAME(Keep)

static const REAL NAME(nothing)[CHUNK]; /* the mask of a stream that is off, so that loops need no branches */
#define NOTHING NAME(nothing)

static void NAME(keep_of)(const Stream *s, const uint32_t *words, REAL *keep, int64_t from, int64_t to) {
    const double *rate = s->rate + from * s->stride;
    int shift = s->high ? 16 : 0;
    if (s->mode == EXPECTED) {
        for (int64_t j = 0; j < to - from; j++) keep[j] = (REAL)rate[j * s->stride];
    } else if (!s->stride) {
        int32_t threshold = (int32_t)rint(*rate * 65536);
#pragma omp simd
        for (int64_t j = 0; j < to - from; j++)
            keep[j] = (int32_t)((words[j] >> shift) & 0xFFFF) < threshold ? (REAL)1 : (REAL)0;
    } else {
#pragma omp simd
        for (int64_t j = 0; j < to - from; j++)
            keep[j] = (int32_t)((words[j] >> shift) & 0xFFFF) < (int32_t)rint(rate[j] * 65536) ? (REAL)1 : (REAL)0;
    }
}

/* Compute the masks of units [from, to) of one row: of states [first, last), and of the update if `update` is set.
 * `from` is a multiple of 4. States whose masks use the same random words are adjacent. */
static void NAME(keeps)(const Loop *l, KEEP *keep, int64_t t, int64_t row, int64_t from, int64_t to, int64_t first,
                        int64_t last, int update) {
    uint32_t words[CHUNK + 4] __attribute__((aligned(64)));
    const Stream *drawn = NULL, *u = &l->update_noise;
    int64_t step = l->first_step + (l->reverse ? l->lengths[row] - 1 - t : t), example = l->examples[row];
    for (int64_t k = first; k < last; k++) {
        const Stream *s = &l->state_noise[k];
        if (s->mode == OFF || s->mode == GIVEN) continue;
        if (s->mode == DRAWN && !(drawn && same_words(drawn, s))) stream_words(s, words, from, to, example, step), drawn = s;
        NAME(keep_of)(s, words, keep->state[k], from, to);
    }
    if (!update || u->mode == OFF || u->mode == GIVEN) return;
    if (u->mode == DRAWN) stream_words(u, words, from, to, example, step);
    NAME(keep_of)(u, words, keep->update, from, to);
}

/* --- cells --------------------------------------------------------------------------------------- */

#define STEP NAME(Step)
#define CELL NAME(Cell)
#define FUNCTION NAME(Function)
#include "step.h"
#include "cells.h"

const void *NAME(zoneout_cell)(int64_t number) { return &NAME(cells)[number]; }


INLINE const CELL *NAME(cell_of)(const Loop *l) { return (const CELL *)l->cell; }
INLINE int64_t NAME(width)(const Loop *l) { return NAME(cell_of)(l)->gates * l->hidden; }

/* --- norms --------------------------------------------------------------------------------------- */

INLINE REAL NAME(inverse)(REAL var, double eps) { return 1 / SQRT(var + (REAL)eps); }

static void NAME(row_moments)(const REAL *v, int64_t n, REAL *mean, REAL *var) {
    double sum = 0, square = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) sum += v[j];
    sum /= (double)n;
#pragma omp simd reduction(+ : square)
    for (int64_t j = 0; j < n; j++) square += (v[j] - sum) * (v[j] - sum);
    *mean = (REAL)sum;
    *var = (REAL)(square / (double)n);
}

/* Compute moments over rows [0, n) of columns [from, to). The sums are of differences to the first row, in double. If
 * all rows are equal, their mean is exactly that row. A rounding error would be divided by the square root of eps. */
static void NAME(column_moments)(const REAL *v, int64_t stride, int64_t n, int64_t from, int64_t to,
                                 REAL *restrict mean, REAL *restrict var) {
    double sum[CHUNK], square[CHUNK];
    for (int64_t j0 = from; j0 < to; j0 += CHUNK) {
        int64_t count = min64(CHUNK, to - j0);
        const REAL *restrict first = v + j0;
        for (int64_t j = 0; j < count; j++) sum[j] = square[j] = 0;
        for (int64_t b = 1; b < n; b++) {
            const REAL *restrict row = v + b * stride + j0;
#pragma omp simd
            for (int64_t j = 0; j < count; j++) {
                double d = (double)row[j] - (double)first[j];
                sum[j] += d, square[j] += d * d;
            }
        }
        for (int64_t j = 0; j < count; j++) {
            double off = sum[j] / (double)n, left = square[j] / (double)n - off * off;
            mean[j0 + j] = (REAL)((double)first[j] + off);
            var[j0 + j] = (REAL)(left > 0 ? left : 0);
        }
    }
}

/* Normalise columns [from, to) of one row: with the two moments of the row, or with the moments of each column. */
static void NAME(hat_of_row)(const Loop *l, REAL *hat, const REAL *v, const REAL *mean, const REAL *var,
                             const REAL *rstd, int64_t from, int64_t to) {
    if (l->norm == NORM_UNITS) {
        REAL m = *mean, r = NAME(inverse)(*var, l->eps);
#pragma omp simd
        for (int64_t j = from; j < to; j++) hat[j] = (v[j] - m) * r;
    } else {
#pragma omp simd
        for (int64_t j = from; j < to; j++) hat[j] = (v[j] - mean[j]) * rstd[j];
    }
}

/* The backward pass of a norm for one row: compute the gradient of v from the gradient of its normalised, scaled form.
 * The gradients of scale and shift are accumulated. `dv` may be `hat`. */
static void NAME(row_back)(REAL *dv, const REAL *d, const REAL *hat, const REAL *scale, int64_t n, REAL rstd,
                           REAL *restrict dscale, REAL *restrict dshift) {
    double one = 0, two = 0;
#pragma omp simd reduction(+ : one, two)
    for (int64_t j = 0; j < n; j++) {
        REAL part = d[j] * hat[j];
        dscale[j] += part;
        one += d[j] * scale[j];
        two += part * scale[j];
    }
    for (int64_t j = 0; dshift && j < n; j++) dshift[j] += d[j];
    REAL m1 = (REAL)(one / (double)n), m2 = (REAL)(two / (double)n);
#pragma omp simd
    for (int64_t j = 0; j < n; j++) dv[j] = rstd * (d[j] * scale[j] - m1 - hat[j] * m2);
}

/* The same for columns [from, to) over rows [0, n); `given` moments are constants. With `mean`, `hat` is v, not yet
 * normalised. */
static void NAME(column_back)(REAL *dv, const REAL *d, const REAL *hat, const REAL *mean, int64_t stride,
                              const REAL *scale, const REAL *var, double eps, int64_t n, int64_t from, int64_t to,
                              int given, REAL *restrict dscale, REAL *restrict dshift) {
    double one[CHUNK], two[CHUNK];
    REAL m1[CHUNK], m2[CHUNK], by[CHUNK], less[CHUNK], rstd[CHUNK];
    double share_of = given ? 0 : 1 / (double)n;
    for (int64_t j0 = from; j0 < to; j0 += CHUNK) {
        int64_t count = min64(CHUNK, to - j0);
#pragma omp simd
        for (int64_t j = 0; j < count; j++) {
            REAL r = NAME(inverse)(var[j0 + j], eps);
            one[j] = two[j] = 0;
            by[j] = r * scale[j0 + j];
            less[j] = mean ? mean[j0 + j] : 0, rstd[j] = mean ? r : 1;
        }
        for (int64_t b = 0; b < n; b++) {
            const REAL *restrict row = d + b * stride + j0, *restrict of = hat + b * stride + j0;
#pragma omp simd
            for (int64_t j = 0; j < count; j++) one[j] += row[j], two[j] += row[j] * ((of[j] - less[j]) * rstd[j]);
        }
        for (int64_t j = 0; j < count; j++) {
            dscale[j0 + j] += two[j];
            if (dshift) dshift[j0 + j] += one[j];
            m1[j] = (REAL)(one[j] * share_of), m2[j] = (REAL)(two[j] * share_of);
        }
        for (int64_t b = 0; b < n; b++) {
            const REAL *row = d + b * stride + j0, *of = hat + b * stride + j0;
            REAL *out = dv + b * stride + j0;
#pragma omp simd
            for (int64_t j = 0; j < count; j++)
                out[j] = by[j] * (row[j] - m1[j] - (of[j] - less[j]) * rstd[j] * m2[j]);
        }
    }
}

/* --- memory layout ------------------------------------------------------------------------------- */

typedef struct { /* scratch memory, shared by the threads */
    REAL *w_ih, *w_hh, *w_hr; /* packed */
    REAL *matrix[PRODUCTS]; /* packed */
    REAL *in;          /* [products][B, H]: inputs of the products inside the step; backward pass: their gradients */
    REAL *chain;       /* [2][B, rank]: between the matrices of a product */
    int64_t rank;
    REAL *product;     /* [B, G] */
    REAL *h_in;        /* [B, P] */
    REAL *raw;         /* [B, H]: the candidate c; backward pass: its gradient */
    REAL *shown;       /* [B, H]: u = o tanh(c); backward pass: its gradient */
    REAL *gate;        /* [B, H]: backward pass: the gradient of the held gate, for the previous step */
    REAL *rstd_x, *rstd_h, *rstd_c; /* [G], [G], [H]: batch norm: 1 / standard deviation at this step */
} NAME(Work);
#define WORK NAME(Work)

/* The number of units of a block of a block-diagonal W_h. */
INLINE int64_t NAME(block)(const Loop *l) { return l->hidden / l->heads; }

INLINE int64_t NAME(packed_recurrent_size)(const Loop *l) {
    int64_t p = l->outputs, g = NAME(width)(l);
    if (l->heads == 0) return 0;
    if (l->heads > 1) return g / NAME(block)(l) * NAME(panel_size)(NAME(block)(l), NAME(block)(l));
    return max64(NAME(panel_size)(p, g), NAME(panel_size)(g, p));
}

/* The widest value between two matrices of a product inside the step. */
static int64_t NAME(rank)(const Loop *l) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t rank = 0;
    for (int64_t p = 0; p < cell->products; p++)
        for (int64_t i = 1; i < cell->links[p]; i++) rank = max64(rank, l->matrix_columns[cell->link[p][i]]);
    return rank;
}

static int64_t NAME(layout)(const Loop *l, WORK *w) {
    int64_t b = l->batch, h = l->hidden, p = l->outputs, g = NAME(width)(l), at = 0;
    char *base = work_of(l);
#define PLACE(name, count) (w->name = (REAL *)(base + at), at += ((count) * (int64_t)sizeof(REAL) + 63) / 64 * 64)
    PLACE(w_ih, l->x ? NAME(panel_size)(l->inputs, g) : 0);
    PLACE(w_hh, NAME(packed_recurrent_size)(l));
    PLACE(w_hr, l->w_hr ? max64(NAME(panel_size)(h, p), NAME(panel_size)(p, h)) : 0);
    for (int64_t m = 0; m < PRODUCTS; m++) {
        int64_t rows = l->matrix_rows[m], columns = l->matrix_columns[m];
        PLACE(matrix[m], max64(NAME(panel_size)(columns, rows), NAME(panel_size)(rows, columns)));
    }
    w->rank = NAME(rank)(l);
    PLACE(in, NAME(cell_of)(l)->products * b * h);
    PLACE(chain, 2 * b * w->rank);
    PLACE(product, b * g);
    PLACE(h_in, b * p);
    PLACE(raw, b * h);
    PLACE(shown, b * h);
    PLACE(gate, b * h);
    PLACE(rstd_x, g);
    PLACE(rstd_h, g);
    PLACE(rstd_c, h * l->threads);
#undef PLACE
    return at;
}

/* Return 1 if each thread should process its own rows for all steps. This needs no barriers, but every thread reads all
 * weights, so they must fit in its cache. Batch norm needs all rows at every step. */
static int NAME(rows_apart)(const Loop *l) {
    int64_t depth = l->heads == 0 ? 0 : l->heads > 1 ? NAME(block)(l) : l->outputs;
    int64_t bytes = (depth + (l->x ? l->inputs : 0)) * NAME(width)(l) * (int64_t)sizeof(REAL);
    for (int64_t m = 0; m < PRODUCTS; m++) bytes += l->matrix_rows[m] * l->matrix_columns[m] * (int64_t)sizeof(REAL);
    return l->threads > 1 && l->norm != NORM_EXAMPLES && l->batch >= 4 * l->threads && bytes <= 1 << 20 &&
           l->counts[l->steps - 1] == l->batch;
}

/* The size in bytes of the offsets and counts of a thread's own rows. */
INLINE int64_t NAME(spans_size)(const Loop *l) { return (2 * l->steps * (int64_t)sizeof(int64_t) + 63) / 64 * 64; }

int64_t NAME(zoneout_work_size)(const Loop *l) {
    WORK w;
    int64_t size = NAME(layout)(l, &w);
    return NAME(rows_apart)(l) ? (size + NAME(spans_size)(l)) * l->threads : size;
}

/* Return the loop of only this thread's rows. */
static Loop NAME(own_rows)(const Loop *l) {
    Loop own = *l;
    WORK w;
    int64_t from, to, h = l->hidden, p = l->outputs, g = NAME(width)(l), id = real_thread_id();
    int64_t size = NAME(layout)(l, &w) + NAME(spans_size)(l);
    int64_t *spans = (int64_t *)(work_of(l) + size * id);
    share(l->batch, 1, &from, &to);
    for (int64_t t = 0; t < l->steps; t++) {
        spans[t] = to - from;
        spans[l->steps + t] = l->offsets[t] + from;
    }
    own.batch = to - from, own.counts = spans, own.offsets = spans + l->steps;
    own.work = (char *)spans + NAME(spans_size)(l);
    own.lengths += from, own.examples += from;
#define MOVE(name, count) own.name = l->name ? (void *)((REAL *)l->name + (count)) : NULL
    MOVE(scale_h, from * p);
    for (int64_t k = 0; k < STATES; k++) {
        int64_t at = from * (k ? h : p);
        MOVE(initial[k], at);
        MOVE(reset_to[k], at);
        MOVE(dstates[k], at);
        MOVE(dreset[k], at);
    }
    for (int64_t k = 0; k < PARAMETERS; k++) MOVE(dparameters[k], id * h);
    MOVE(dscale_x, id * g);
    MOVE(dscale_h, id * g);
    MOVE(dscale_c, id * h);
    MOVE(dshift_c, id * h);
#undef MOVE
    return own;
}

/* Compute which rows and units of a step belong to this thread. Without W_h they are the same in all steps, and no
 * thread waits for another. */
INLINE void NAME(region)(const Loop *l, int64_t rows, int64_t units, int64_t *b0, int64_t *b1, int64_t *j0,
                         int64_t *j1) {
    int64_t shared = l->heads ? rows : l->batch;
    *b0 = *j0 = 0, *b1 = rows, *j1 = units;
    if (l->norm != NORM_NONE || shared >= 2 * thread_count()) {
        share(shared, 1, b0, b1);
        *b0 = min64(*b0, rows), *b1 = min64(*b1, rows);
    } else {
        share(units, 16, j0, j1);
    }
}

/* Return a state of a row before a step: of the previous step, the initial state, or the state after a reset. */
INLINE const REAL *NAME(old_state)(const Loop *l, int64_t k, int64_t t, int64_t row) {
    int64_t size = k ? l->hidden : l->outputs;
    if (l->resets && l->resets[l->offsets[t] + row]) return (const REAL *)l->reset_to[k] + row * size;
    if (t == 0) return (const REAL *)l->initial[k] + row * size;
    return (const REAL *)l->states[k] + (l->offsets[t - 1] + row) * size;
}

/* --- forward pass -------------------------------------------------------------------------------- */

/* Batch norm: the moments of some columns at a step, computed or given, and 1 / standard deviation. Each thread has its
 * own columns; all threads must finish before any result is used. */
static void NAME(columns)(const Loop *l, const REAL *v, int64_t size, void *means, void *vars, REAL *rstd, int64_t t) {
    REAL *mean = (REAL *)means + t * size, *var = (REAL *)vars + t * size;
    int64_t from, to;
    share(size, 16, &from, &to);
    if (v && !l->norm_given) NAME(column_moments)(v, size, l->counts[t], from, to, mean, var);
#pragma omp simd
    for (int64_t j = from; j < to; j++) rstd[j] = NAME(inverse)(var[j], l->eps);
}

/* Normalise, scale and shift both products of a step in place; the normalised h·Wh is also stored in `hats`. If the
 * cell merges the products, the sum replaces x·Wx. Layer norm: rows [b0, b1). Batch norm: each thread has the columns
 * whose moments it computed, which keeps traffic between threads low. All threads must finish before any result is
 * used. */
static void NAME(normalise_both)(const Loop *l, WORK *w, int64_t t, int64_t g, int64_t b0, int64_t b1) {
    int rows = l->norm == NORM_UNITS, apart = (int)NAME(cell_of)(l)->apart;
    int64_t off = l->offsets[t], moments = rows ? off : t * g, from = 0, to = g;
    REAL *x = (REAL *)l->gates + off * g, *hats = (REAL *)l->hats + off * g;
    REAL *mean_x = (REAL *)l->mean_x + moments, *var_x = (REAL *)l->var_x + moments;
    REAL *mean_h = (REAL *)l->mean_h + moments, *var_h = (REAL *)l->var_h + moments;
    const REAL *restrict scale_x = l->norm_x, *restrict scale_h = l->norm_h, *restrict bias = l->b_h;
    if (!rows) {
        NAME(columns)(l, x, g, l->mean_x, l->var_x, w->rstd_x, t);
        NAME(columns)(l, w->product, g, l->mean_h, l->var_h, w->rstd_h, t);
        share(g, 16, &from, &to);
        b0 = 0, b1 = l->counts[t];
    }
    for (int64_t b = b0; b < b1; b++) {
        int64_t at = rows ? b : 0;
        REAL *restrict row = x + b * g, *restrict product = w->product + b * g, *restrict hat = hats + b * g;
        if (rows) {
            NAME(row_moments)(row, g, mean_x + b, var_x + b);
            NAME(row_moments)(product, g, mean_h + b, var_h + b);
        }
        NAME(hat_of_row)(l, row, row, mean_x + at, var_x + at, w->rstd_x, from, to);
        NAME(hat_of_row)(l, hat, product, mean_h + at, var_h + at, w->rstd_h, from, to);
        if (apart) {
#pragma omp simd
            for (int64_t j = from; j < to; j++) row[j] *= scale_x[j], product[j] = hat[j] * scale_h[j];
        } else {
#pragma omp simd
            for (int64_t j = from; j < to; j++) row[j] = row[j] * scale_x[j] + hat[j] * scale_h[j];
        }
        REAL *shifted = apart ? product : row;
        for (int64_t j = from; bias && j < to; j++) shifted[j] += bias[j];
    }
    if (!rows) barrier();
}

/* Write c normalised to `hat`, and its scaled and shifted form, which h is computed from, to `out`. */
static void NAME(normalise_c)(const Loop *l, WORK *w, const REAL *c, REAL *hat, REAL *out, int64_t t, int64_t row,
                              int64_t from, int64_t to) {
    int64_t at = l->norm == NORM_UNITS ? l->offsets[t] + row : t * l->hidden;
    const REAL *restrict scale = l->norm_c, *restrict shift = l->norm_c_shift;
    NAME(hat_of_row)(l, hat, c, (REAL *)l->mean_c + at, (REAL *)l->var_c + at, w->rstd_c, from, to);
#pragma omp simd
    for (int64_t j = from; j < to; j++) out[j] = hat[j] * scale[j] + shift[j];
}

/* Return the masks of a stream for one row, `size` units wide: given, drawn for units from `from` on, or zeros. */
INLINE const REAL *NAME(mask_of)(const Stream *s, const REAL *keep, int64_t at, int64_t size, int64_t from) {
    return s->mode == GIVEN ? (const REAL *)s->given + at * size : (s->mode == OFF ? NOTHING : keep) - from;
}

/* Set the pointers to gates, masks and states of one row for units from `from` on. If h is projected, its masks are
 * applied after the projection. */
static void NAME(point)(const Loop *l, WORK *w, const KEEP *keep, STEP *s, int64_t t, int64_t row, int64_t from) {
    const CELL *cell = NAME(cell_of)(l);
    const Stream *update = &l->update_noise;
    int64_t h = l->hidden, g = cell->gates * h, at = l->offsets[t] + row;
    const REAL *none = NOTHING - from;
    for (int64_t q = 0; q < cell->gates; q++) {
        s->gate[q] = (REAL *)l->gates + at * g + q * h;
        s->bias_x[q] = (const REAL *)l->b_x + q * h;
        if (cell->apart) {
            s->r[q] = w->product + row * g + q * h;
            s->bias_r[q] = l->b_h && !l->norm ? (const REAL *)l->b_h + q * h : none; /* a norm has already added it */
        }
    }
    for (int64_t k = 0; k < cell->states; k++) {
        int64_t lead = cell->lead[k];
        const Stream *noise = &l->state_noise[lead];
        const REAL *mask = NAME(mask_of)(noise, keep->state[lead], at, h, from);
        int projected = k == 0 && l->w_hr;
        s->old[k] = projected ? none : NAME(old_state)(l, k, t, row);
        s->zone[k] = !projected && !noise->zero ? mask : none;
        s->zero[k] = !projected && noise->zero ? mask : none;
        s->drop[k] = NAME(mask_of)(&l->dropped[lead], NULL, at, h, from);
        s->add[k] = NAME(mask_of)(&l->added[lead], NULL, at, h, from);
    }
    for (int64_t k = 0; k < cell->parameters; k++) s->parameter[k] = l->parameters[k];
    s->update = NAME(mask_of)(update, keep->update, at, h, from);
    s->hold = s->held = none;
    if (update->hold && t > 0 && !(l->resets && l->resets[at])) { /* otherwise there is no gate to hold */
        int64_t before = l->offsets[t - 1] + row;
        s->hold = s->update;
        s->held = cell->held < cell->gates ? (const REAL *)l->gates + before * g + cell->held * h
                                           : (const REAL *)l->slots[cell->held - cell->gates] + before * h;
    }
}

/* Set the pointers to the slots of a step: each has its own array, except those that a norm stores anyway. */
INLINE void NAME(point_slots)(const Loop *l, STEP *s, int64_t t, int64_t row, int64_t from, REAL *slots) {
    int64_t at = (l->offsets[t] + row) * l->hidden;
    for (int64_t k = 0; k < NAME(cell_of)(l)->slots; k++)
        s->slot[k] = l->slots[k] ? (REAL *)l->slots[k] + at : slots + k * CHUNK - from;
}

/* Return the variant of a step that the noise needs. */
INLINE int NAME(variant)(const Loop *l) {
    int variant = l->update_noise.mode != OFF ? DROPOUTS : ZONEOUT;
    for (int64_t k = 0; k < STATES; k++) {
        const Stream *s = &l->state_noise[k];
        if (s->dgiven || l->dropped[k].mode != OFF || l->added[k].mode != OFF) return MASKS;
        if (s->mode != OFF && s->zero) variant = DROPOUTS;
    }
    return l->update_noise.dgiven ? MASKS : variant;
}

/* Apply the noise of h to the candidate `new`, and write the new h to y. */
INLINE void NAME(carry_h)(const Loop *l, const KEEP *keep, const REAL *new, int64_t t, int64_t row, int64_t from,
                          int64_t to) {
    int64_t p = l->outputs;
    const Stream *noise = &l->state_noise[0];
    REAL *restrict y = (REAL *)l->states[0] + (l->offsets[t] + row) * p;
    const REAL *restrict old = NAME(old_state)(l, 0, t, row);
    const REAL *restrict k = NAME(mask_of)(noise, keep->state[0], l->offsets[t] + row, p, from);
    if (noise->mode == OFF) {
        memcpy(y + from, new + from, sizeof(REAL) * (to - from));
    } else if (noise->zero) {
#pragma omp simd
        for (int64_t j = from; j < to; j++) y[j] = LESS(new[j], k[j]);
    } else {
#pragma omp simd
        for (int64_t j = from; j < to; j++) y[j] = MIX(new[j], old[j], k[j]);
    }
}

/* Pack the matrices of the products inside the step, for the forward or the backward pass. A single step reads them
 * only once: packing them does not pay. */
static void NAME(pack_matrices)(const Loop *l, WORK *w, int backward) {
    for (int64_t m = 0; m < PRODUCTS && l->matrices[m] && (backward || l->steps > 1); m++) {
        int64_t rows = l->matrix_rows[m], columns = l->matrix_columns[m];
        NAME(pack)(w->matrix[m], l->matrices[m], backward ? rows : columns, backward ? columns : rows,
                   backward ? columns : 1, backward ? 1 : columns);
    }
}

/* Apply the matrices of a product inside the step to n rows; backward: transposed, the last one first. All threads must
 * wait before and after it. */
static void NAME(chain)(const Loop *l, WORK *w, int64_t product, int64_t n, const REAL *in, REAL *out, int backward) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t links = cell->links[product];
    for (int64_t i = 0; i < links; i++) {
        int64_t m = cell->link[product][backward ? links - 1 - i : i];
        int64_t rows = l->matrix_rows[m], columns = l->matrix_columns[m];
        int64_t depth = backward ? rows : columns, size = backward ? columns : rows;
        REAL *to = i == links - 1 ? out : w->chain + i % 2 * l->batch * w->rank;
        NAME(product_of)(n, depth, size, in, depth, backward || l->steps > 1 ? w->matrix[m] : NULL, l->matrices[m], 1,
                         columns, to, size, 0); /* the strides of an unpacked matrix are those of the forward pass */
        if (links > 1) barrier();
        in = to;
    }
}

/* Set the pointers to the products of one row: their results and gradients, and their inputs. */
INLINE void NAME(point_products)(const Loop *l, WORK *w, STEP *s, int64_t t, int64_t row, int backward) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t h = l->hidden, at = l->offsets[t] + row, part = 0;
    for (int64_t p = 0; p < cell->products; p++) {
        REAL *work = w->in + (p * l->batch + row) * h;
        s->in[p] = backward ? (REAL *)l->ins[p] + at * h : work;
        s->din[p] = work;
        for (int64_t q = 0; q < cell->parts[p]; q++, part++) {
            s->inner[part] = (const REAL *)l->inner[p] + (at * cell->parts[p] + q) * h;
            if (backward) s->dinner[part] = (REAL *)l->dinner[p] + (at * cell->parts[p] + q) * h;
        }
    }
}

/* Compute the products inside a step, level by level. */
static void NAME(products_forward)(const Loop *l, WORK *w, int64_t t) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t h = l->hidden, n = l->counts[t], b0, b1, j0, j1;
    int variant = NAME(variant)(l);
    REAL slots[SLOTS * CHUNK];
    KEEP keep;
    STEP s;
    NAME(region)(l, n, h, &b0, &b1, &j0, &j1);
    for (int64_t level = 0; level < cell->levels; level++) {
        for (int64_t b = b0; b < b1; b++)
            for (int64_t from = j0; from < j1; from += CHUNK) {
                int64_t to = min64(j1, from + CHUNK);
                if (variant) NAME(keeps)(l, &keep, t, b, from, to, l->w_hr != NULL, cell->states, 1);
                NAME(point)(l, w, &keep, &s, t, b, from);
                NAME(point_slots)(l, &s, t, b, from, slots);
                NAME(point_products)(l, w, &s, t, b, 0);
                cell->enter[variant][level](&s, from, to);
            }
        barrier();
        for (int64_t p = 0; p < cell->products; p++)
            if (cell->level[p] == level)
                NAME(chain)(l, w, p, n, w->in + p * l->batch * h,
                            (REAL *)l->inner[p] + l->offsets[t] * cell->parts[p] * h, 0);
        barrier();
    }
}

/* Run one step of all rows: compute gates and states from the products. */
static void NAME(step_forward)(const Loop *l, WORK *w, int64_t t) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t h = l->hidden, p = l->outputs, off = l->offsets[t], n = l->counts[t], b0, b1, j0, j1;
    int project = l->w_hr != NULL, split = l->norm && cell->norm_shows;
    FUNCTION *forward = split ? cell->norm_gates : cell->forward[NAME(variant)(l)];
    REAL slots[SLOTS * CHUNK], hat[CHUNK], shown[CHUNK];
    KEEP keep;
    STEP s;
    NAME(region)(l, n, h, &b0, &b1, &j0, &j1);
    if (l->norm) NAME(normalise_both)(l, w, t, cell->gates * h, b0, b1);
    if (cell->products) NAME(products_forward)(l, w, t);
    for (int second = 0; second <= split; second++) { /* the norm of the shown value lies between the parts */
        if (second && l->norm == NORM_EXAMPLES) {
            barrier();
            NAME(columns)(l, w->raw, h, l->mean_c, l->var_c, w->rstd_c, t);
            barrier();
        }
        for (int64_t b = b0; b < b1; b++) {
            if (second && l->norm == NORM_UNITS)
                NAME(row_moments)(w->raw + b * h, h, (REAL *)l->mean_c + off + b, (REAL *)l->var_c + off + b);
            for (int64_t from = j0; from < j1; from += CHUNK) {
                int64_t to = min64(j1, from + CHUNK);
                NAME(keeps)(l, &keep, t, b, from, to, project, cell->states, 1);
                NAME(point)(l, w, &keep, &s, t, b, from);
                NAME(point_slots)(l, &s, t, b, from, slots);
                NAME(point_products)(l, w, &s, t, b, 0);
                s.new[0] = project ? w->shown + b * h : (REAL *)l->states[0] + (off + b) * p;
                for (int64_t k = 1; k < cell->states; k++) s.new[k] = (REAL *)l->states[k] + (off + b) * h;
                s.raw = w->raw + b * h;
                if (second) {
                    NAME(normalise_c)(l, w, s.raw, hat - from, shown - from, t, b, from, to);
                    s.shown = shown - from;
                    cell->norm_shows(&s, from, to);
                } else {
                    forward(&s, from, to);
                }
            }
        }
    }
    if (!project) return;
    barrier();
    NAME(product)(n, h, p, w->shown, h, w->w_hr, w->product, p, 0);
    barrier();
    share(n, 1, &b0, &b1);
    for (int64_t b = b0; b < b1; b++)
        for (int64_t from = 0; from < p; from += CHUNK) {
            int64_t to = min64(p, from + CHUNK);
            NAME(keeps)(l, &keep, t, b, from, to, 0, 1, 0);
            NAME(carry_h)(l, &keep, w->product + b * p, t, b, from, to);
        }
}

/* Return h before a step, the left operand of the product: unchanged, or with resets and the variational mask. */
static const REAL *NAME(left_side)(const Loop *l, WORK *w, int64_t t) {
    int64_t p = l->outputs, b0, b1;
    if (!l->resets && !l->scale_h) return t ? (REAL *)l->states[0] + l->offsets[t - 1] * p : (const REAL *)l->initial[0];
    share(l->counts[t], 1, &b0, &b1);
    for (int64_t b = b0; b < b1; b++) {
        const REAL *h = NAME(old_state)(l, 0, t, b), *scale = (const REAL *)l->scale_h + b * p;
        for (int64_t j = 0; j < p; j++) w->h_in[b * p + j] = l->scale_h ? h[j] * scale[j] : h[j];
    }
    barrier();
    return w->h_in;
}

/* Pack W_h: transposed for the forward pass, not transposed for the backward pass. A block-diagonal W_h is packed block
 * by block. */
static void NAME(pack_recurrent)(const Loop *l, REAL *packed, int backward) {
    int64_t p = l->outputs, g = NAME(width)(l), d, from, to;
    if (l->heads == 1) NAME(pack)(packed, l->w_hh, backward ? g : p, backward ? p : g, backward ? p : 1, backward ? 1 : p);
    if (l->heads <= 1) return;
    d = NAME(block)(l);
    share(g / d, 1, &from, &to);
    for (int64_t task = from; task < to; task++) {
        REAL *out = packed + task * NAME(panel_size)(d, d);
        const REAL *w = (const REAL *)l->w_hh + task * d * d;
        for (int64_t panel = 0; panel * TILE < d; panel++)
            NAME(pack_panel)(out + panel * TILE * d, w + panel * TILE * (backward ? 1 : d), d, min64(TILE, d - panel * TILE),
                             NAME(panel_width)(d, panel), backward ? d : 1, backward ? 1 : d);
    }
}

/* out[n][G] (+)= h · W_h. */
static void NAME(recurrent_product)(const Loop *l, int64_t n, const REAL *h, const REAL *packed, REAL *out, int add) {
    int64_t p = l->outputs, g = NAME(width)(l), d, from, to;
    if (l->heads == 1) NAME(product_of)(n, p, g, h, p, packed, l->w_hh, 1, p, out, g, add);
    if (l->heads <= 1) return;
    d = NAME(block)(l);
    share(g / d, 1, &from, &to);
    int was = alone;
    alone = 1;
    for (int64_t task = from; task < to; task++) /* one block of one gate */
        NAME(product)(n, d, d, h + task % l->heads * d, p, packed + task * NAME(panel_size)(d, d), out + task * d, g, add);
    alone = was;
}

/* dh[n][P] (+)= dr · W_hᵀ. */
static void NAME(recurrent_product_back)(const Loop *l, int64_t n, const REAL *dr, const REAL *packed, REAL *dh, int add) {
    int64_t p = l->outputs, g = NAME(width)(l), d, from, to;
    if (l->heads == 1) NAME(product)(n, g, p, dr, g, packed, dh, p, add);
    if (l->heads <= 1) return;
    d = NAME(block)(l);
    share(l->heads, 1, &from, &to);
    int was = alone;
    alone = 1;
    for (int64_t task = from; task < to; task++) /* one head */
        for (int64_t q = 0; q < g / l->hidden; q++)
            NAME(product)(n, d, d, dr + q * l->hidden + task * d, g,
                          packed + (q * l->heads + task) * NAME(panel_size)(d, d), dh + task * d, p, add || q);
    alone = was;
}

/* Run all steps with the current team of threads. */
static void NAME(run_forward)(const Loop *l, WORK *w) {
    int64_t h = l->hidden, p = l->outputs, g = NAME(width)(l);
    int apart = l->norm || NAME(cell_of)(l)->apart; /* h·Wh is kept apart from x·Wx, not simply added to it */
    int once = l->steps == 1 && l->heads == 1; /* the weights are read only once: packing them does not pay */
    if (!once) NAME(pack_recurrent)(l, w->w_hh, 0);
    if (l->x && !once) NAME(pack)(w->w_ih, l->w_ih, l->inputs, g, 1, l->inputs);
    if (l->w_hr) NAME(pack)(w->w_hr, l->w_hr, h, p, 1, h);
    NAME(pack_matrices)(l, w, 0);
    barrier();
    for (int64_t t = 0; t < l->steps && l->counts[t] > 0; t++) {
        REAL *gates = (REAL *)l->gates + l->offsets[t] * g;
        if (l->x) { /* this thread computes the same tiles in both products */
            const REAL *x = (const REAL *)l->x + l->offsets[t] * l->inputs;
            NAME(product_of)(l->counts[t], l->inputs, g, x, l->inputs, once ? NULL : w->w_ih, l->w_ih, 1, l->inputs,
                             gates, g, 0);
        }
        if (l->heads) {
            const REAL *left = NAME(left_side)(l, w, t);
            if (l->x && l->heads > 1) barrier(); /* threads share blocks differently from the tiles of x */
            NAME(recurrent_product)(l, l->counts[t], left, once ? NULL : w->w_hh, apart ? w->product : gates, !apart);
        }
        if (l->heads || l->x) barrier();
        NAME(step_forward)(l, w, t);
        if (l->heads) barrier();
    }
}

/* A pass over a loop, with threads that share every step, or with threads that have their own rows. */
typedef struct {
    void (*pass)(const Loop *, WORK *);
    const Loop *loop;
    WORK shared;
    int apart;
} NAME(Pass);

static void NAME(pass_task)(void *arguments) {
    NAME(Pass) *p = arguments;
    if (!p->apart) {
        p->pass(p->loop, &p->shared);
        return;
    }
    Loop own = NAME(own_rows)(p->loop);
    WORK mine;
    NAME(layout)(&own, &mine);
    alone = 1;
    p->pass(&own, &mine);
    alone = 0;
}

static void NAME(in_team)(const Loop *l, void (*pass)(const Loop *, WORK *)) {
    NAME(Pass) p = {.pass = pass, .loop = l, .apart = NAME(rows_apart)(l)};
    if (!p.apart) NAME(layout)(l, &p.shared);
    in_threads(l->threads, NAME(pass_task), &p);
}

void NAME(zoneout_forward)(const Loop *l) { NAME(in_team)(l, NAME(run_forward)); }

/* --- backward pass ------------------------------------------------------------------------------- */

/* Write the gradient of the candidate h to `d`, and the part that goes directly to the previous h to dh. */
INLINE void NAME(carry_back)(const Loop *l, const KEEP *keep, REAL *d, int64_t t, int64_t row, int64_t from,
                             int64_t to) {
    int64_t p = l->outputs;
    const Stream *noise = &l->state_noise[0];
    REAL *restrict dh = (REAL *)l->dstates[0] + row * p;
    const REAL *restrict dy = (const REAL *)l->dy + (l->offsets[t] + row) * p;
    const REAL *restrict k = NAME(mask_of)(noise, keep->state[0], l->offsets[t] + row, p, from);
    REAL straight = noise->zero ? 0 : 1;
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL all = dh[j] + dy[j];
        d[j] = all * (1 - k[j]);
        dh[j] = all * k[j] * straight;
    }
}

/* The backward pass of a norm, from the gradient of its result: rows [b0, b1), or this thread's columns. */
static void NAME(normalise_back)(const Loop *l, REAL *dv, const REAL *d, const REAL *hat, const void *means,
                                 const void *vars, const REAL *scale, void *dscales, void *dshifts, int64_t t,
                                 int64_t size, int64_t b0, int64_t b1) {
    const REAL *var = vars, *mean = means ? (const REAL *)means + t * size : NULL;
    REAL *dscale = (REAL *)dscales + thread_id() * size, *dshift = dshifts ? (REAL *)dshifts + thread_id() * size : NULL;
    if (l->norm == NORM_UNITS) {
        for (int64_t b = b0; b < b1; b++) {
            REAL rstd = NAME(inverse)(var[l->offsets[t] + b], l->eps);
            NAME(row_back)(dv + b * size, d + b * size, hat + b * size, scale, size, rstd, dscale, dshift);
        }
    } else {
        int64_t from, to;
        share(size, 16, &from, &to);
        NAME(column_back)(dv, d, hat, mean, size, scale, var + t * size, l->eps, l->counts[t], from, to,
                          (int)l->norm_given, dscale, dshift);
    }
}

/* The backward pass of the norms of both products of a step, after the gates of all rows. x·Wx is normalised again. */
static void NAME(normalise_both_back)(const Loop *l, int64_t t, int64_t g, int64_t b0, int64_t b1) {
    int64_t at = l->offsets[t] * g;
    REAL *x = (REAL *)l->dx + at;
    const REAL *mean = (const REAL *)l->mean_x + l->offsets[t], *var = (const REAL *)l->var_x + l->offsets[t];
    int rows = l->norm == NORM_UNITS;
    if (!rows) barrier();
    for (int64_t b = b0; rows && b < b1; b++)
        NAME(hat_of_row)(l, x + b * g, x + b * g, mean + b, var + b, NULL, 0, g);
    NAME(normalise_back)(l, x, (const REAL *)l->dgx + at, x, rows ? NULL : l->mean_x, l->var_x, l->norm_x, l->dscale_x,
                         NULL, t, g, b0, b1);
    NAME(normalise_back)(l, (REAL *)l->dgh + at, (const REAL *)l->dsh + at, (const REAL *)l->hats + at, NULL, l->var_h,
                         l->norm_h, l->dscale_h, NULL, t, g, b0, b1);
}

/* Set the pointers to the gradients of one row. */
static void NAME(point_back)(const Loop *l, WORK *w, STEP *s, int64_t t, int64_t row, int64_t from) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t h = l->hidden, p = l->outputs, g = cell->gates * h, at = l->offsets[t] + row;
    for (int64_t q = 0; q < cell->gates; q++) {
        s->dx[q] = (REAL *)l->dgx + at * g + q * h;
        s->dr[q] = (REAL *)l->dsh + at * g + q * h;
    }
    s->dstate[0] = l->w_hr ? w->shown + row * h : (REAL *)l->dstates[0] + row * p;
    s->dy = l->w_hr ? NOTHING - from : (const REAL *)l->dy + at * p;
    for (int64_t k = 1; k < cell->states; k++) s->dstate[k] = (REAL *)l->dstates[k] + row * h;
    for (int64_t k = 0; k < cell->parameters; k++) s->dparameter[k] = (REAL *)l->dparameters[k] + thread_id() * h;
    s->owed = w->gate + row * h;
}

/* Set the pointers to the gradients of given masks of one row; those that are not wanted go to `unused`. */
static void NAME(point_masks)(const Loop *l, STEP *s, int64_t t, int64_t row, int64_t from, REAL *unused) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t at = (l->offsets[t] + row) * l->hidden;
#define GRADIENT(stream, wanted) ((stream).dgiven && (wanted) ? (REAL *)(stream).dgiven + at : (unused += CHUNK) - from)
    for (int64_t k = 0; k < cell->states; k++) {
        const Stream *noise = &l->state_noise[k];
        s->dzone[k] = GRADIENT(*noise, !noise->zero);
        s->dzero[k] = GRADIENT(*noise, noise->zero);
        s->ddrop[k] = GRADIENT(l->dropped[k], 1);
        s->dadd[k] = GRADIENT(l->added[k], 1);
    }
    s->dupdate = GRADIENT(l->update_noise, 1);
    s->dhold = (unused += CHUNK) - from;
#undef GRADIENT
}

/* With a norm, recompute the slots that store h·W_h of a gate, normalised, scaled and shifted. */
static void NAME(slots_again)(const Loop *l, STEP *s, int64_t t, int64_t row, int64_t from, int64_t to) {
    const CELL *cell = NAME(cell_of)(l);
    for (int64_t k = 0; k < cell->slots; k++) {
        int64_t h = l->hidden, g = NAME(width)(l), gate = cell->slot_gate[k] * h;
        if (l->slots[k]) continue;
        const REAL *restrict hat = (const REAL *)l->hats + (l->offsets[t] + row) * g + gate;
        const REAL *restrict scale = (const REAL *)l->norm_h + gate, *restrict bias = (const REAL *)l->b_h + gate;
        REAL *restrict slot = s->slot[k];
        for (int64_t j = from; j < to; j++) slot[j] = hat[j] * scale[j] + (l->b_h ? bias[j] : 0);
    }
}

/* Add the gradients of the states other than h, if they are returned at every step. */
INLINE void NAME(add_seen)(const Loop *l, STEP *s, int64_t t, int64_t row, int64_t from, int64_t to) {
    for (int64_t k = 1; k < NAME(cell_of)(l)->states; k++) {
        if (!l->dseen[k]) continue;
        const REAL *restrict more = (const REAL *)l->dseen[k] + (l->offsets[t] + row) * l->hidden;
        REAL *restrict to_state = s->dstate[k];
        for (int64_t j = from; j < to; j++) to_state[j] += more[j];
    }
}

/* Compute the gradients of the products inside a step and of their inputs, the highest level first. Adds the
 * gradients of the states that are returned at every step. */
static void NAME(products_back)(const Loop *l, WORK *w, int64_t t) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t h = l->hidden, n = l->counts[t], b0, b1, j0, j1;
    int variant = NAME(variant)(l);
    REAL slots[SLOTS * CHUNK];
    KEEP keep;
    STEP s;
    NAME(region)(l, n, h, &b0, &b1, &j0, &j1);
    for (int64_t level = cell->levels - 1; level >= 0; level--) {
        for (int64_t b = b0; b < b1; b++)
            for (int64_t from = j0; from < j1; from += CHUNK) {
                int64_t to = min64(j1, from + CHUNK);
                NAME(keeps)(l, &keep, t, b, from, to, l->w_hr != NULL, cell->states, 1);
                NAME(point)(l, w, &keep, &s, t, b, from);
                NAME(point_slots)(l, &s, t, b, from, slots);
                NAME(point_back)(l, w, &s, t, b, from);
                NAME(point_products)(l, w, &s, t, b, 1);
                if (l->norm) NAME(slots_again)(l, &s, t, b, from, to);
                if (level == cell->levels - 1) {
                    NAME(add_seen)(l, &s, t, b, from, to);
                    cell->inputs[variant](&s, from, to);
                }
                cell->leave[variant][level](&s, from, to);
            }
        barrier();
        for (int64_t p = 0; p < cell->products; p++)
            if (cell->level[p] == level)
                NAME(chain)(l, w, p, n, (const REAL *)l->dinner[p] + l->offsets[t] * cell->parts[p] * h,
                            w->in + p * l->batch * h, 1);
        barrier();
    }
}

/* Run the backward pass of one step of all rows. */
static void NAME(step_backward)(const Loop *l, WORK *w, int64_t t) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t h = l->hidden, p = l->outputs, off = l->offsets[t], n = l->counts[t], b0, b1, j0, j1;
    int project = l->w_hr != NULL, split = l->norm && cell->norm_shows;
    int variant = NAME(variant)(l);
    FUNCTION *backward = cell->backward[variant];
    REAL slots[SLOTS * CHUNK], raw[CHUNK], shown[CHUNK], unused[CHUNK], of_masks[(4 * STATES + 3) * CHUNK];
    KEEP keep;
    STEP s;
    if (project) {
        share(n, 1, &b0, &b1);
        for (int64_t b = b0; b < b1; b++)
            for (int64_t from = 0; from < p; from += CHUNK) {
                int64_t to = min64(p, from + CHUNK);
                NAME(keeps)(l, &keep, t, b, from, to, 0, 1, 0);
                NAME(carry_back)(l, &keep, (REAL *)l->du + (off + b) * p, t, b, from, to);
            }
        barrier();
        NAME(product)(n, p, h, (const REAL *)l->du + off * p, p, w->w_hr, w->shown, h, 0);
        barrier();
    }
    if (cell->products) NAME(products_back)(l, w, t);
    NAME(region)(l, n, h, &b0, &b1, &j0, &j1);
    WORK own = *w; /* 1 / standard deviation of c: each thread has its own copy, so it need not wait */
    if (split && l->norm == NORM_EXAMPLES) {
        const REAL *restrict var = (const REAL *)l->var_c + t * h;
        own.rstd_c = w->rstd_c + thread_id() * h;
#pragma omp simd
        for (int64_t j = 0; j < h; j++) own.rstd_c[j] = NAME(inverse)(var[j], l->eps);
    }
    for (int second = 0; second <= split; second++) {
        if (second) {
            if (l->norm == NORM_EXAMPLES) barrier();
            NAME(normalise_back)(l, w->raw, (const REAL *)l->dnc + off * h, (const REAL *)l->chat + off * h, NULL,
                                 l->var_c, l->norm_c, l->dscale_c, l->dshift_c, t, h, b0, b1);
            if (l->norm == NORM_EXAMPLES) barrier();
        }
        for (int64_t b = b0; b < b1; b++)
            for (int64_t from = j0; from < j1; from += CHUNK) {
                int64_t to = min64(j1, from + CHUNK), at = (off + b) * h;
                NAME(keeps)(l, &keep, t, b, from, to, project, cell->states, 1);
                NAME(point)(l, w, &keep, &s, t, b, from);
                NAME(point_slots)(l, &s, t, b, from, slots);
                NAME(point_back)(l, w, &s, t, b, from);
                NAME(point_products)(l, w, &s, t, b, 1);
                if (l->norm) NAME(slots_again)(l, &s, t, b, from, to);
                if (!second && !cell->products) NAME(add_seen)(l, &s, t, b, from, to);
                if (variant == MASKS) NAME(point_masks)(l, &s, t, b, from, of_masks);
                s.raw = raw - from, s.shown = shown - from, s.draw = w->raw + b * h, s.dshown = (REAL *)l->dnc + at;
                if (split) { /* recompute the cell's shown value */
                    cell->norm_raw(&s, from, to);
                    NAME(normalise_c)(l, &own, raw - from, (REAL *)l->chat + at, shown - from, t, b, from, to);
                }
                if (l->u && !second) {
                    s.new[0] = (REAL *)l->u + at;
                    for (int64_t k = 1; k < cell->states; k++) s.new[k] = unused - from;
                    (split ? cell->norm_shows : cell->again[variant])(&s, from, to);
                }
                (split ? second ? cell->norm_back_gates : cell->norm_back_shows : backward)(&s, from, to);
            }
    }
    if (l->norm) NAME(normalise_both_back)(l, t, cell->gates * h, b0, b1);
}

/* Move the gradients of reset rows to the states after a reset; they do not reach earlier steps. */
static void NAME(cut_back)(const Loop *l, int64_t t) {
    int64_t b0, b1;
    share(l->counts[t], 1, &b0, &b1);
    for (int64_t b = b0; b < b1; b++) {
        if (!l->resets[l->offsets[t] + b]) continue;
        for (int64_t k = 0; k < NAME(cell_of)(l)->states; k++) {
            int64_t size = k ? l->hidden : l->outputs;
            REAL *d = (REAL *)l->dstates[k] + b * size, *back = (REAL *)l->dreset[k] + b * size;
            for (int64_t j = 0; j < size; j++) back[j] += d[j], d[j] = 0;
        }
    }
    barrier();
}

/* Add n rows, with their mean subtracted. */
static void NAME(add_centred)(REAL *restrict out, const REAL *restrict v, int64_t n, int64_t size) {
    int64_t from, to;
    share(size, 16, &from, &to);
    for (int64_t j = from; j < to; j++) {
        double sum = 0;
        for (int64_t b = 0; b < n; b++) sum += v[b * size + j];
        for (int64_t b = 0; b < n; b++) out[b * size + j] += v[b * size + j] - (REAL)(sum / n);
    }
}

static void NAME(run_backward)(const Loop *l, WORK *w) {
    int64_t h = l->hidden, p = l->outputs, g = NAME(width)(l), from, to;
    share(l->batch, 1, &from, &to);
    memset(w->gate + from * h, 0, sizeof(REAL) * (to - from) * h);
    NAME(pack_recurrent)(l, w->w_hh, 1);
    if (l->w_hr) NAME(pack)(w->w_hr, l->w_hr, p, h, h, 1);
    NAME(pack_matrices)(l, w, 1);
    barrier();
    for (int64_t t = l->steps - 1; t >= 0; t--) {
        int64_t n = l->counts[t];
        if (n == 0) continue;
        NAME(step_backward)(l, w, t);
        if (!l->heads) {
            if (l->resets) barrier(), NAME(cut_back)(l, t);
            continue;
        }
        barrier();
        const REAL *left = (const REAL *)l->dgh + l->offsets[t] * g;
        /* With batch norm, the gradient of the initial h sums to zero: its mean is a rounding error (Loop.balanced). */
        int centred = t == 0 && l->norm == NORM_EXAMPLES && !l->norm_given && !l->scale_h, apart = centred || l->scale_h;
        NAME(recurrent_product_back)(l, n, left, w->w_hh, apart ? w->h_in : (REAL *)l->dstates[0], !apart);
        barrier();
        if (centred) {
            NAME(add_centred)(l->dstates[0], w->h_in, n, p);
            barrier();
        }
        if (l->scale_h) {
            share(n, 1, &from, &to);
            for (int64_t j = from * p; j < to * p; j++)
                ((REAL *)l->dstates[0])[j] += w->h_in[j] * ((const REAL *)l->scale_h)[j];
            barrier();
        }
        if (l->resets) NAME(cut_back)(l, t);
    }
}

void NAME(zoneout_backward)(const Loop *l) { NAME(in_team)(l, NAME(run_backward)); }

#undef TILE_OF
#undef LANES
#undef TILE
#undef DEPTH
#undef PIECE
#undef BLOCK_ROWS
#undef CHUNK
#undef VEC
#undef KEEP
#undef NOTHING
#undef WORK
#undef STEP
#undef CELL
#undef FUNCTION
