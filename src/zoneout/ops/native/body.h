/* The loop over time for one type, REAL. Included by loop.c. In the order: products, noise, forward, backward. */

#define LANES ((int64_t)(VECTOR_BYTES / sizeof(REAL)))
#define TILE (LANES * TILE_VECTORS) /* columns of a packed panel */
#define DEPTH 1024                  /* of a product at a time: a panel's part then stays in the cache */
#define PIECE 64                    /* the same where it is packed on the way */
#define BLOCK_ROWS 128              /* of a product of many at a time: they then stay in the cache */
#define CHUNK 256                   /* units of a row at a time: what is held for them stays in the cache */

typedef REAL NAME(vec) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL))));
#define VEC NAME(vec)

/* --- products ------------------------------------------------------------------------------------ */

/* Panels have TILE columns but for the last, which has as many vectors as it needs. */
INLINE int64_t NAME(panel_size)(int64_t k, int64_t n) { return (n + LANES - 1) / LANES * LANES * k; }
INLINE int64_t NAME(panel_width)(int64_t n, int64_t panel) {
    return min64(TILE, (n - panel * TILE + LANES - 1) / LANES * LANES);
}

/* out[i][j] = w[i + j * sn] for LANES of each. */
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

/* b[k][n] = w[k * sk + n * sn], of `cols` columns, filled up with zeros to [k][width]. */
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

/* All columns, cut into panels; each thread does its share of them. */
static void NAME(pack)(REAL *packed, const REAL *w, int64_t k, int64_t n, int64_t sk, int64_t sn) {
    int64_t from, to;
    share((n + TILE - 1) / TILE, 1, &from, &to);
    for (int64_t panel = from; panel < to; panel++)
        NAME(pack_panel)(packed + panel * TILE * k, w + panel * TILE * sn, k, min64(TILE, n - panel * TILE),
                         NAME(panel_width)(n, panel), sk, sn);
}

INLINE void NAME(tile)(int rows, int vectors, int64_t k, const REAL *a, int64_t lda, const REAL *b, REAL *c,
                       int64_t ldc, int add) {
    VEC sum[TILE_ROWS][TILE_VECTORS];
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < vectors; v++) sum[m][v] = add ? *(const VEC *)(c + m * ldc + v * LANES) : (VEC){0};
    for (int64_t i = 0; i < k; i++) {
        VEC row[TILE_VECTORS];
        for (int v = 0; v < vectors; v++) row[v] = *(const VEC *)(b + (i * vectors + v) * LANES);
        for (int m = 0; m < rows; m++) {
            VEC one = a[m * lda + i] - (VEC){0};
            for (int v = 0; v < vectors; v++) sum[m][v] += one * row[v];
        }
    }
    for (int m = 0; m < rows; m++)
        for (int v = 0; v < vectors; v++) *(VEC *)(c + m * ldc + v * LANES) = sum[m][v];
}

#define TILE_OF(vectors)                                                                                             \
    static void NAME(tile_##vectors)(int64_t rows, int64_t k, const REAL *a, int64_t lda, const REAL *b, REAL *c,     \
                                     int64_t ldc, int add) {                                                         \
        for (; rows >= TILE_ROWS; rows -= TILE_ROWS, a += TILE_ROWS * lda, c += TILE_ROWS * ldc)                     \
            NAME(tile)(TILE_ROWS, vectors, k, a, lda, b, c, ldc, add);                                               \
        if (rows >= 4) {                                                                                             \
            NAME(tile)(4, vectors, k, a, lda, b, c, ldc, add);                                                       \
            rows -= 4, a += 4 * lda, c += 4 * ldc;                                                                   \
        }                                                                                                            \
        if (rows >= 2) {                                                                                             \
            NAME(tile)(2, vectors, k, a, lda, b, c, ldc, add);                                                       \
            rows -= 2, a += 2 * lda, c += 2 * ldc;                                                                   \
        }                                                                                                            \
        if (rows) NAME(tile)(1, vectors, k, a, lda, b, c, ldc, add);                                                 \
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

/* c[m][n] (+)= a[m][k] · b; each thread does its share of the tiles. b is packed, or else as `pack` takes it: then what is
 * needed of it is packed on the way. Each number of c is added up in the order of k, so that its bits depend neither on the
 * other rows nor on how the tiles are shared. */
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
            for (int64_t done = 0; done < rows; done += TILE_ROWS) { /* a vector that would reach past the row */
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

/* A product of many rows at once: c[m][n] = a[m][k] · b with b[k][n] = w[k * sk + n * sn]. `packed` has room for as many
 * numbers as zoneout_packed_size says; few rows need none. */
int64_t NAME(zoneout_packed_size)(int64_t m, int64_t k, int64_t n) {
    return m > BLOCK_ROWS ? NAME(panel_size)(k, n) : 0;
}

void NAME(zoneout_product)(int64_t m, int64_t k, int64_t n, const REAL *a, const REAL *w, int64_t sk, int64_t sn, REAL *c,
                           REAL *packed, int64_t threads) {
#pragma omp parallel num_threads((int)(m * k * n < 1 << 16 ? 1 : threads))
    {
        if (m <= BLOCK_ROWS) {
            NAME(product_of)(m, k, n, a, k, NULL, w, sk, sn, c, n, 0);
        } else {
            NAME(pack)(packed, w, k, n, sk, sn);
            barrier();
            for (int64_t row = 0; row < m; row += BLOCK_ROWS)
                NAME(product)(min64(BLOCK_ROWS, m - row), k, n, a + row * k, k, packed, c + row * n, n, 0);
        }
    }
}

/* --- noise --------------------------------------------------------------------------------------- */

/* 1 where the old value (or zero) takes the place of the new one, its chance at evaluation. */
typedef struct {
    REAL cell[CHUNK], hidden[CHUNK], update[CHUNK];
} NAME(Keep);
#define KEEP NAME(Keep)

static const REAL NAME(nothing)[CHUNK]; /* the keep of a stream that is off: loops stay free of branches */
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

/* The keeps of units [from, to) of one row, of the streams asked for; `from` is a multiple of 4. */
static void NAME(keeps)(const Loop *l, KEEP *keep, int64_t t, int64_t row, int64_t from, int64_t to, int cell,
                        int hidden) {
    uint32_t words[CHUNK + 4] __attribute__((aligned(64)));
    const Stream *c = &l->cell_noise, *h = &l->hidden_noise, *u = &l->update_noise;
    int64_t step = l->first_step + (l->reverse ? l->lengths[row] - 1 - t : t), example = l->examples[row];
    int have = 0;
    if (cell && c->mode) {
        if (c->mode == DRAWN) stream_words(c, words, from, to, example, step), have = 1;
        NAME(keep_of)(c, words, keep->cell, from, to);
    }
    if (hidden && h->mode) {
        if (h->mode == DRAWN && !(have && same_words(c, h))) stream_words(h, words, from, to, example, step);
        NAME(keep_of)(h, words, keep->hidden, from, to);
    }
    if (cell && u->mode) {
        if (u->mode == DRAWN) stream_words(u, words, from, to, example, step);
        NAME(keep_of)(u, words, keep->update, from, to);
    }
}

/* --- cells --------------------------------------------------------------------------------------- */

#define STEP NAME(Step)
#define CELL NAME(Cell)
#define FUNCTION NAME(Function)
#include "step.h"
#include "cells.h"

INLINE const CELL *NAME(cell_of)(const Loop *l) { return &NAME(cells)[l->cell]; }
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

/* Moments over rows [0, n) of columns [from, to). Sums are of differences to the first row, in double: where all rows are
 * alike their mean is that row and nothing is left of it, which would be divided by the root of eps. */
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

/* Columns [from, to) of one row normalised: over the row (its own two moments) or over each column. */
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

/* The derivative through a normalisation: of v from that of its normalised, scaled form, for one row; and those of
 * scale and shift, added to what is there. `dv` may be `hat`. */
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

/* The same for columns [from, to) over rows [0, n); `given` moments are constants. With `mean`, `hat` is v, which is not
 * normalised yet. */
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

/* --- where things are ---------------------------------------------------------------------------- */

typedef struct { /* scratch, shared by the threads */
    REAL *w_ih, *w_hh, *w_hr; /* packed */
    REAL *product;     /* [B, G] */
    REAL *h_in;        /* [B, P] */
    REAL *raw;         /* [B, H]: the candidate c; backwards: of u */
    REAL *shown;       /* [B, H]: u = o tanh(c) */
    REAL *gate;        /* [B, H]: backwards: what the held output gate owes to the step before */
    REAL *rstd_x, *rstd_h, *rstd_c; /* [G], [G], [H]: batch norm: 1 / deviation at this step */
} NAME(Work);
#define WORK NAME(Work)

static int64_t NAME(layout)(const Loop *l, WORK *w) {
    int64_t b = l->batch, h = l->hidden, p = l->outputs, g = NAME(width)(l), at = 0;
    char *base = (char *)l->work;
#define PLACE(name, count) (w->name = (REAL *)(base + at), at += ((count) * (int64_t)sizeof(REAL) + 63) / 64 * 64)
    PLACE(w_ih, l->x ? NAME(panel_size)(l->inputs, g) : 0);
    PLACE(w_hh, max64(NAME(panel_size)(p, g), NAME(panel_size)(g, p)));
    PLACE(w_hr, l->w_hr ? max64(NAME(panel_size)(h, p), NAME(panel_size)(p, h)) : 0);
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

/* Whether each thread is better off with rows of its own for all steps: no barrier at all, but every thread reads all
 * of the weights, so they must fit its cache. Batch norm needs all rows at every step. */
static int NAME(rows_apart)(const Loop *l) {
    int64_t bytes = (l->outputs + (l->x ? l->inputs : 0)) * NAME(width)(l) * (int64_t)sizeof(REAL);
    return l->threads > 1 && l->norm != NORM_EXAMPLES && l->batch >= 4 * l->threads && bytes <= 1 << 20 &&
           l->counts[l->steps - 1] == l->batch;
}

/* Room for the offsets and counts of a thread's own rows. */
INLINE int64_t NAME(spans_size)(const Loop *l) { return (2 * l->steps * (int64_t)sizeof(int64_t) + 63) / 64 * 64; }

int64_t NAME(zoneout_work_size)(const Loop *l) {
    WORK w;
    int64_t size = NAME(layout)(l, &w);
    return NAME(rows_apart)(l) ? (size + NAME(spans_size)(l)) * l->threads : size;
}

/* The loop of this thread's rows alone. */
static Loop NAME(own_rows)(const Loop *l) {
    Loop own = *l;
    WORK w;
    int64_t from, to, h = l->hidden, p = l->outputs, g = NAME(width)(l), id = real_thread_id();
    int64_t size = NAME(layout)(l, &w) + NAME(spans_size)(l);
    int64_t *spans = (int64_t *)((char *)l->work + size * id);
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
    MOVE(h0, from * p);
    MOVE(c0, from * h);
    MOVE(reset_h, from * p);
    MOVE(reset_c, from * h);
    MOVE(dh, from * p);
    MOVE(dc, from * h);
    MOVE(dreset_h, from * p);
    MOVE(dreset_c, from * h);
    MOVE(dscale_x, id * g);
    MOVE(dscale_h, id * g);
    MOVE(dscale_c, id * h);
    MOVE(dshift_c, id * h);
#undef MOVE
    return own;
}

/* Which rows and units of a step are this thread's. */
INLINE void NAME(region)(const Loop *l, int64_t rows, int64_t units, int64_t *b0, int64_t *b1, int64_t *j0,
                         int64_t *j1) {
    *b0 = *j0 = 0, *b1 = rows, *j1 = units;
    if (l->norm != NORM_NONE || rows >= 2 * thread_count())
        share(rows, 1, b0, b1);
    else
        share(units, 16, j0, j1);
}

/* The h and the c that a row had before a step: of the step before, the initial one, or what a reset goes back to. */
INLINE const REAL *NAME(before)(const Loop *l, const void *states, const void *initial, const void *reset, int64_t t,
                                int64_t row, int64_t size) {
    if (l->resets && l->resets[l->offsets[t] + row]) return (const REAL *)reset + row * size;
    if (t == 0) return (const REAL *)initial + row * size;
    return (const REAL *)states + (l->offsets[t - 1] + row) * size;
}
INLINE const REAL *NAME(old_h)(const Loop *l, int64_t t, int64_t row) {
    return NAME(before)(l, l->y, l->h0, l->reset_h, t, row, l->outputs);
}
INLINE const REAL *NAME(old_c)(const Loop *l, int64_t t, int64_t row) {
    return NAME(before)(l, l->c, l->c0, l->reset_c, t, row, l->hidden);
}

/* --- forwards ------------------------------------------------------------------------------------ */

/* Batch norm: the moments of some columns at a step, taken or given, and 1 / deviation. Each thread has its columns; all
 * of them must be done before any is used. */
static void NAME(columns)(const Loop *l, const REAL *v, int64_t size, void *means, void *vars, REAL *rstd, int64_t t) {
    REAL *mean = (REAL *)means + t * size, *var = (REAL *)vars + t * size;
    int64_t from, to;
    share(size, 16, &from, &to);
    if (v && !l->norm_given) NAME(column_moments)(v, size, l->counts[t], from, to, mean, var);
#pragma omp simd
    for (int64_t j = from; j < to; j++) rstd[j] = NAME(inverse)(var[j], l->eps);
}

/* Both products of a step normalised, scaled and shifted, each where it is and h's also in `gh`; where the cell takes them
 * merged, the sum takes the place of x's. Layer norm: rows [b0, b1). Batch norm: each thread has the columns that it took the moments of,
 * so that little goes from one to another, and all must be done before any is used. */
static void NAME(normalise_both)(const Loop *l, WORK *w, int64_t t, int64_t g, int64_t b0, int64_t b1) {
    int rows = l->norm == NORM_UNITS, apart = (int)NAME(cell_of)(l)->apart;
    int64_t off = l->offsets[t], moments = rows ? off : t * g, from = 0, to = g;
    REAL *x = (REAL *)l->gates + off * g, *hats = (REAL *)l->gh + off * g;
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

/* c normalised (`hat`), and scaled and shifted as it feeds h. */
static void NAME(normalise_c)(const Loop *l, WORK *w, const REAL *c, REAL *hat, REAL *out, int64_t t, int64_t row,
                              int64_t from, int64_t to) {
    int64_t at = l->norm == NORM_UNITS ? l->offsets[t] + row : t * l->hidden;
    const REAL *restrict scale = l->norm_c, *restrict shift = l->norm_c_shift;
    NAME(hat_of_row)(l, hat, c, (REAL *)l->mean_c + at, (REAL *)l->var_c + at, w->rstd_c, from, to);
#pragma omp simd
    for (int64_t j = from; j < to; j++) out[j] = hat[j] * scale[j] + shift[j];
}

/* The keeps of what the cell's noise does: sets c to zero, keeps c, drops the update, holds the output gate. */
INLINE const REAL *NAME(zeroes)(const Loop *l, const KEEP *keep) {
    return l->cell_noise.mode != OFF && l->cell_noise.zero ? keep->cell : NOTHING;
}
INLINE const REAL *NAME(zones)(const Loop *l, const KEEP *keep) {
    return l->cell_noise.mode != OFF && !l->cell_noise.zero ? keep->cell : NOTHING;
}
INLINE const REAL *NAME(drops)(const Loop *l, const KEEP *keep) {
    return l->update_noise.mode != OFF ? keep->update : NOTHING;
}
INLINE const REAL *NAME(holds)(const Loop *l, const KEEP *keep) {
    return l->update_noise.mode != OFF && l->update_noise.hold ? keep->update : NOTHING;
}

/* The masks and states of one row for units from `from` on. Where h is projected, its masks are used after that. */
static void NAME(point)(const Loop *l, WORK *w, const KEEP *keep, STEP *s, int64_t t, int64_t row, int64_t from) {
    const CELL *cell = NAME(cell_of)(l);
    const Stream *hidden = &l->hidden_noise;
    int64_t h = l->hidden, g = cell->gates * h, at = l->offsets[t] + row;
    int plain = !l->w_hr, keeps = plain && hidden->mode != OFF;
    const REAL *none = NOTHING - from;
    for (int64_t q = 0; q < cell->gates; q++) {
        s->gate[q] = (REAL *)l->gates + at * g + q * h;
        s->bias_x[q] = (const REAL *)l->b_x + q * h;
        if (cell->apart) {
            s->r[q] = w->product + row * g + q * h;
            s->bias_r[q] = l->b_h && !l->norm ? (const REAL *)l->b_h + q * h : none; /* a norm has added it already */
        }
    }
    s->old[0] = plain ? NAME(old_h)(l, t, row) : none;
    s->zone[0] = keeps && !hidden->zero ? keep->hidden - from : none;
    s->zero[0] = keeps && hidden->zero ? keep->hidden - from : none;
    if (cell->states > 1) {
        s->old[1] = NAME(old_c)(l, t, row);
        s->zone[1] = NAME(zones)(l, keep) - from, s->zero[1] = NAME(zeroes)(l, keep) - from;
    }
    s->update = NAME(drops)(l, keep) - from;
    s->hold = s->held = none;
    if (l->update_noise.hold && t > 0 && !(l->resets && l->resets[at])) { /* else there is no gate to hold */
        s->hold = NAME(holds)(l, keep) - from;
        s->held = (const REAL *)l->gates + (l->offsets[t - 1] + row) * g + cell->held * h;
    }
}

/* Which variant of a step runs: 0 has zoneout alone, 1 all rules of noise. */
INLINE int NAME(variant)(const Loop *l) {
    const Stream *c = &l->cell_noise, *h = &l->hidden_noise;
    return l->update_noise.mode != OFF || (c->mode != OFF && c->zero) || (h->mode != OFF && h->zero);
}

/* The h that is carried, from the candidate. */
INLINE void NAME(carry_h)(const Loop *l, const KEEP *keep, const REAL *new, int64_t t, int64_t row, int64_t from,
                          int64_t to) {
    int64_t p = l->outputs;
    REAL *restrict y = (REAL *)l->y + (l->offsets[t] + row) * p;
    const REAL *restrict old = NAME(old_h)(l, t, row), *restrict k = keep->hidden - from;
    if (l->hidden_noise.mode == OFF) {
        memcpy(y + from, new + from, sizeof(REAL) * (to - from));
    } else if (l->hidden_noise.zero) {
#pragma omp simd
        for (int64_t j = from; j < to; j++) y[j] = LESS(new[j], k[j]);
    } else {
#pragma omp simd
        for (int64_t j = from; j < to; j++) y[j] = MIX(new[j], old[j], k[j]);
    }
}

/* One step of all rows: gates and states from the products. */
static void NAME(step_forward)(const Loop *l, WORK *w, int64_t t) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t h = l->hidden, p = l->outputs, off = l->offsets[t], n = l->counts[t], b0, b1, j0, j1;
    int project = l->w_hr != NULL, split = l->norm && cell->norm_shows;
    FUNCTION *forward = split ? cell->norm_gates : cell->forward[NAME(variant)(l)];
    REAL slot[CHUNK], hat[CHUNK], shown[CHUNK];
    KEEP keep;
    STEP s;
    NAME(region)(l, n, h, &b0, &b1, &j0, &j1);
    if (l->norm) NAME(normalise_both)(l, w, t, cell->gates * h, b0, b1);
    for (int second = 0; second <= split; second++) { /* a norm of what the cell shows lies between the two parts */
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
                NAME(keeps)(l, &keep, t, b, from, to, 1, !project);
                NAME(point)(l, w, &keep, &s, t, b, from);
                s.new[0] = project ? w->shown + b * h : (REAL *)l->y + (off + b) * p;
                s.new[1] = (REAL *)l->c + (off + b) * h;
                s.slot[0] = l->norm ? slot - from : (REAL *)l->gh + (off + b) * h;
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
            NAME(keeps)(l, &keep, t, b, from, to, 0, 1);
            NAME(carry_h)(l, &keep, w->product + b * p, t, b, from, to);
        }
}

/* What the product takes of the states before a step: as they are, or with resets and the variational mask. */
static const REAL *NAME(left_side)(const Loop *l, WORK *w, int64_t t) {
    int64_t p = l->outputs, b0, b1;
    if (!l->resets && !l->scale_h) return t ? (REAL *)l->y + l->offsets[t - 1] * p : (const REAL *)l->h0;
    share(l->counts[t], 1, &b0, &b1);
    for (int64_t b = b0; b < b1; b++) {
        const REAL *h = NAME(old_h)(l, t, b), *scale = (const REAL *)l->scale_h + b * p;
        for (int64_t j = 0; j < p; j++) w->h_in[b * p + j] = l->scale_h ? h[j] * scale[j] : h[j];
    }
    barrier();
    return w->h_in;
}

/* All steps, by the threads that are here. */
static void NAME(run_forward)(const Loop *l, WORK *w) {
    int64_t h = l->hidden, p = l->outputs, g = NAME(width)(l);
    int apart = l->norm || NAME(cell_of)(l)->apart; /* h·Wh is not simply added to x's part */
    int once = l->steps == 1;              /* weights are read once: nothing is gained by packing them first */
    if (!once) NAME(pack)(w->w_hh, l->w_hh, p, g, 1, p);
    if (l->x && !once) NAME(pack)(w->w_ih, l->w_ih, l->inputs, g, 1, l->inputs);
    if (l->w_hr) NAME(pack)(w->w_hr, l->w_hr, h, p, 1, h);
    barrier();
    for (int64_t t = 0; t < l->steps && l->counts[t] > 0; t++) {
        const REAL *left = NAME(left_side)(l, w, t);
        REAL *gates = (REAL *)l->gates + l->offsets[t] * g;
        if (l->x) { /* the same tiles are this thread's in both products */
            const REAL *x = (const REAL *)l->x + l->offsets[t] * l->inputs;
            NAME(product_of)(l->counts[t], l->inputs, g, x, l->inputs, once ? NULL : w->w_ih, l->w_ih, 1, l->inputs,
                             gates, g, 0);
        }
        NAME(product_of)(l->counts[t], p, g, left, p, once ? NULL : w->w_hh, l->w_hh, 1, p,
                         apart ? w->product : gates, g, !apart);
        barrier();
        NAME(step_forward)(l, w, t);
        barrier();
    }
}

/* Run a pass with threads that share every step, or that have rows of their own. */
#define TEAM(pass)                                                                                                    \
    WORK shared;                                                                                                      \
    int apart = NAME(rows_apart)(l);                                                                                  \
    if (!apart) NAME(layout)(l, &shared);                                                                             \
    _Pragma("omp parallel num_threads((int)l->threads)") {                                                            \
        if (apart) {                                                                                                  \
            Loop own = NAME(own_rows)(l);                                                                             \
            WORK mine;                                                                                                \
            NAME(layout)(&own, &mine);                                                                                \
            alone = 1;                                                                                                \
            pass(&own, &mine);                                                                                        \
            alone = 0;                                                                                                \
        } else {                                                                                                      \
            pass(l, &shared);                                                                                         \
        }                                                                                                             \
    }

void NAME(zoneout_forward)(const Loop *l) { TEAM(NAME(run_forward)) }

/* --- backwards ----------------------------------------------------------------------------------- */

/* Of the candidate h, and into dh what goes straight to the h before. */
INLINE void NAME(carry_back)(const Loop *l, const KEEP *keep, REAL *d, int64_t t, int64_t row, int64_t from,
                             int64_t to) {
    int64_t p = l->outputs;
    REAL *restrict dh = (REAL *)l->dh + row * p;
    const REAL *restrict dy = (const REAL *)l->dy + (l->offsets[t] + row) * p;
    const REAL *restrict k = (l->hidden_noise.mode != OFF ? keep->hidden : NOTHING) - from;
    REAL straight = l->hidden_noise.zero ? 0 : 1;
#pragma omp simd
    for (int64_t j = from; j < to; j++) {
        REAL all = dh[j] + dy[j];
        d[j] = all * (1 - k[j]);
        dh[j] = all * k[j] * straight;
    }
}

/* Through a normalisation, from the derivative of its result: rows [b0, b1), or this thread's columns. */
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

/* Of both products of a step, the gates of all rows being done; x·Wx is normalised once more. */
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
    NAME(normalise_back)(l, (REAL *)l->dgh + at, (const REAL *)l->dsh + at, (const REAL *)l->gh + at, NULL, l->var_h,
                         l->norm_h, l->dscale_h, NULL, t, g, b0, b1);
}

/* The gradients of one row go to and come from here. */
static void NAME(point_back)(const Loop *l, WORK *w, STEP *s, int64_t t, int64_t row, int64_t from, REAL *slot) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t h = l->hidden, p = l->outputs, g = cell->gates * h, at = l->offsets[t] + row;
    for (int64_t q = 0; q < cell->gates; q++) {
        s->dx[q] = (REAL *)l->dgx + at * g + q * h;
        s->dr[q] = (REAL *)l->dsh + at * g + q * h;
    }
    s->dstate[0] = l->w_hr ? w->shown + row * h : (REAL *)l->dh + row * p;
    s->dy = l->w_hr ? NOTHING - from : (const REAL *)l->dy + at * p;
    s->dstate[1] = (REAL *)l->dc + row * h;
    s->owed = w->gate + row * h;
    s->slot[0] = l->norm ? slot - from : (REAL *)l->gh + at * h;
}

/* With a norm, the slot of a cell that takes h·W_h apart: its last gate's part, normalised, scaled and shifted. */
static void NAME(slot_again)(const Loop *l, REAL *slot, int64_t t, int64_t row, int64_t from, int64_t to) {
    int64_t h = l->hidden, g = NAME(width)(l), last = g - h;
    const REAL *restrict hat = (const REAL *)l->gh + (l->offsets[t] + row) * g + last;
    const REAL *restrict scale = (const REAL *)l->norm_h + last, *restrict bias = (const REAL *)l->b_h + last;
    for (int64_t j = from; j < to; j++) slot[j - from] = hat[j] * scale[j] + (l->b_h ? bias[j] : 0);
}

/* One step of all rows, backwards. */
static void NAME(step_backward)(const Loop *l, WORK *w, int64_t t) {
    const CELL *cell = NAME(cell_of)(l);
    int64_t h = l->hidden, p = l->outputs, off = l->offsets[t], n = l->counts[t], b0, b1, j0, j1;
    int project = l->w_hr != NULL, split = l->norm && cell->norm_shows;
    FUNCTION *backward = cell->backward[NAME(variant)(l)];
    REAL slot[CHUNK], raw[CHUNK], shown[CHUNK], unused[CHUNK];
    KEEP keep;
    STEP s;
    if (project) {
        share(n, 1, &b0, &b1);
        for (int64_t b = b0; b < b1; b++)
            for (int64_t from = 0; from < p; from += CHUNK) {
                int64_t to = min64(p, from + CHUNK);
                NAME(keeps)(l, &keep, t, b, from, to, 0, 1);
                NAME(carry_back)(l, &keep, (REAL *)l->du + (off + b) * p, t, b, from, to);
            }
        barrier();
        NAME(product)(n, p, h, (const REAL *)l->du + off * p, p, w->w_hr, w->shown, h, 0);
        barrier();
    }
    NAME(region)(l, n, h, &b0, &b1, &j0, &j1);
    WORK own = *w; /* 1 / deviation of c: each thread has its own, and waits for no other */
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
                NAME(keeps)(l, &keep, t, b, from, to, 1, !project);
                NAME(point)(l, w, &keep, &s, t, b, from);
                NAME(point_back)(l, w, &s, t, b, from, slot);
                if (l->norm && cell->apart) NAME(slot_again)(l, slot, t, b, from, to);
                if (l->dcells && !second) {
                    const REAL *restrict more = (const REAL *)l->dcells + at;
                    for (int64_t j = from; j < to; j++) s.dstate[1][j] += more[j];
                }
                s.raw = raw - from, s.shown = shown - from, s.draw = w->raw + b * h, s.dshown = (REAL *)l->dnc + at;
                if (split) { /* what the cell showed, once more */
                    cell->norm_raw(&s, from, to);
                    NAME(normalise_c)(l, &own, raw - from, (REAL *)l->chat + at, shown - from, t, b, from, to);
                }
                if (l->u && !second) {
                    s.new[0] = (REAL *)l->u + at, s.new[1] = unused - from;
                    (split ? cell->norm_shows : cell->again[NAME(variant)(l)])(&s, from, to);
                }
                (split ? second ? cell->norm_back_gates : cell->norm_back_shows : backward)(&s, from, to);
            }
    }
    if (l->norm) NAME(normalise_both_back)(l, t, cell->gates * h, b0, b1);
}

/* What goes back to the state after a reset, and no further. */
static void NAME(cut_back)(const Loop *l, int64_t t) {
    int64_t h = l->hidden, p = l->outputs, b0, b1;
    share(l->counts[t], 1, &b0, &b1);
    for (int64_t b = b0; b < b1; b++) {
        if (!l->resets[l->offsets[t] + b]) continue;
        REAL *dh = (REAL *)l->dh + b * p, *dc = (REAL *)l->dc + b * h;
        REAL *back_h = (REAL *)l->dreset_h + b * p, *back_c = (REAL *)l->dreset_c + b * h;
        for (int64_t j = 0; j < p; j++) back_h[j] += dh[j], dh[j] = 0;
        for (int64_t j = 0; NAME(cell_of)(l)->states > 1 && j < h; j++) back_c[j] += dc[j], dc[j] = 0;
    }
    barrier();
}

/* Add n rows without their mean. */
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
    NAME(pack)(w->w_hh, l->w_hh, g, p, p, 1);
    if (l->w_hr) NAME(pack)(w->w_hr, l->w_hr, p, h, h, 1);
    barrier();
    for (int64_t t = l->steps - 1; t >= 0; t--) {
        int64_t n = l->counts[t];
        if (n == 0) continue;
        NAME(step_backward)(l, w, t);
        barrier();
        const REAL *left = (const REAL *)l->dgh + l->offsets[t] * g;
        /* What goes back to the initial h adds up to zero behind a batch norm: its mean is rounding (Loop.balanced). */
        int centred = t == 0 && l->norm == NORM_EXAMPLES && !l->norm_given && !l->scale_h, apart = centred || l->scale_h;
        NAME(product)(n, g, p, left, g, w->w_hh, apart ? w->h_in : (REAL *)l->dh, p, !apart);
        barrier();
        if (centred) {
            NAME(add_centred)(l->dh, w->h_in, n, p);
            barrier();
        }
        if (l->scale_h) {
            share(n, 1, &from, &to);
            for (int64_t j = from * p; j < to * p; j++)
                ((REAL *)l->dh)[j] += w->h_in[j] * ((const REAL *)l->scale_h)[j];
            barrier();
        }
        if (l->resets) NAME(cut_back)(l, t);
    }
}

void NAME(zoneout_backward)(const Loop *l) { TEAM(NAME(run_backward)) }

#undef TEAM
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
