/* What the loop over time is given. `ops/native/__init__.py` fills the same struct; keep the two together.
 *
 * Rows are packed: step t has counts[t] rows, which start at row offsets[t] of every [N, ·] array, longest
 * sequence first, so that the rows of a step are a prefix of the rows of the step before.
 */
#ifndef ZONEOUT_LOOP_H
#define ZONEOUT_LOOP_H
#include <stdint.h>

enum { NORM_NONE, NORM_UNITS, NORM_EXAMPLES };
enum { OFF, DRAWN, EXPECTED };

typedef struct { /* one stream of noise */
    int64_t mode; /* OFF, DRAWN: 16 random bits against the rate, EXPECTED: the rate in the mask's place */
    int64_t zero; /* the value is replaced by zero, not by the previous one */
    int64_t hold; /* update: the output gate too keeps its previous value */
    int64_t sees_step, sees_example, sees_unit;
    int64_t high; /* which half of a word */
    int64_t plane;
    uint64_t seed;
    const double *rate; /* one, or [units] */
    int64_t stride;     /* of the rates: 0 where one serves all units */
} Stream;

typedef struct {
    int64_t cell; /* its place in `cells` of cells.h */
    int64_t steps, batch, hidden, outputs, threads;
    int64_t first_step, reverse; /* reversed: position = lengths[row] - 1 - t */
    const int64_t *counts, *offsets; /* [T] */
    const int64_t *lengths;          /* [B] */
    const int64_t *examples;         /* [B] */
    const uint8_t *resets;           /* [N], or NULL */
    Stream cell_noise, hidden_noise, update_noise;
    const void *scale_h; /* [B, P]: variational mask on h where it enters the gates, or NULL */
    int64_t norm, norm_given;
    double eps;
    int64_t inputs;
    const void *x, *w_ih; /* [N, inputs], [G, inputs]: where x·Wx is taken step by step; NULL: it is in `gates` */
    const void *w_hh, *b_x, *b_h, *w_hr;      /* [G, P]; [G]; [G] or NULL; [P, H] or NULL */
    const void *norm_x, *norm_h, *norm_c, *norm_c_shift; /* [G], [G], [H], [H] */
    const void *h0, *c0;                      /* [B, P], [B, H] */
    const void *reset_h, *reset_c;            /* [B, P], [B, H]: the state that a reset goes back to */
    /* the forward pass writes these, the backward pass reads them */
    void *gates;   /* [N, G]: in: x·Wx; out: activated gates (plain RNN: the candidate h) */
    void *gh;      /* [N, G]: norm: h·Wh normalised; GRU without norm: [N, H], the n part of h·Wh + b */
    void *y, *c;   /* [N, P], [N, H] */
    void *mean_x, *var_x; /* as those of h */
    void *mean_h, *var_h; /* [N] (layer norm) or [T, G]; read where `norm_given` */
    void *mean_c, *var_c; /* [N] or [T, H] */
    /* the backward pass */
    const void *dy, *dcells; /* [N, P]; [N, H] or NULL */
    void *dh, *dc;           /* [B, P], [B, H]: in: of the final states; out: of the initial ones */
    void *dreset_h, *dreset_c; /* [B, P], [B, H]: of what resets go back to, begun at zero */
    void *dgx, *dgh, *dsh;   /* [N, G]: of x's part as it meets the gates; of h·Wh; of h·Wh once normalised (may be one) */
    void *du, *u;            /* projection: [N, P] and [N, H] */
    void *dnc, *chat;        /* norm: [N, H]: of the normalised c, and c normalised */
    void *dx;                /* norm: [N, G]: in: x·Wx; out: of x·Wx */
    void *dscale_x, *dscale_h, *dscale_c, *dshift_c; /* norm: [threads, G or H], begun at zero; to be summed */
    void *work;              /* scratch, zoneout_work_size() bytes, 64-byte aligned */
} Loop;
#endif
