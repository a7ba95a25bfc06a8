/* The input of the loop over time. `native.py` declares the same struct; change both together.
 *
 * Rows are packed: step t has counts[t] rows, which start at row offsets[t] of every [N, ·] array. The longest
 * sequence comes first, so the rows of a step are a prefix of the rows of the previous step.
 */
#ifndef ZONEOUT_LOOP_H
#define ZONEOUT_LOOP_H
#include <stdint.h>

enum { GATES = 8, STATES = 4, PARAMETERS = 8, SLOTS = 2, PRODUCTS = 16 }; /* the maximum of a cell */
enum { NORM_NONE, NORM_UNITS, NORM_EXAMPLES };
enum { OFF, DRAWN, EXPECTED, GIVEN };
enum { ZONEOUT, DROPOUTS, MASKS }; /* variants of a step: zoneout alone; all drawn masks; given masks, with gradients */

typedef struct { /* one stream of noise */
    int64_t mode; /* OFF; DRAWN: compare 16 random bits with the rate; EXPECTED: the rate replaces the mask; GIVEN */
    int64_t zero; /* replace the value by zero, not by the previous value */
    int64_t hold; /* update: the output gate also keeps its previous value */
    int64_t sees_step, sees_example, sees_unit;
    int64_t high; /* use the high half of a word */
    int64_t plane;
    const int64_t *seed; /* DRAWN */
    const double *rate; /* one, or [units] */
    int64_t stride;     /* of the rates: 0 if all units share one */
    const void *given;  /* GIVEN: the masks, [N, units] */
    void *dgiven;       /* their gradient, or NULL */
} Stream;

typedef struct {
    const void *cell; /* a Cell of step.h, for the number type */
    int64_t steps, batch, hidden, outputs, threads;
    int64_t heads; /* blocks of a block-diagonal W_h; 1: dense; 0: no W_h */
    int64_t first_step, reverse; /* reversed: position = lengths[row] - 1 - t */
    const int64_t *counts, *offsets; /* [T] */
    const int64_t *lengths;          /* [B] */
    const int64_t *examples;         /* [B] */
    const uint8_t *resets;           /* [N], or NULL */
    Stream state_noise[STATES], update_noise;
    Stream dropped[STATES], added[STATES]; /* OFF or GIVEN: leave the new value of a state out; add the old value */
    const void *scale_h; /* [B, P]: variational mask of h as it enters the gates, or NULL */
    int64_t norm, norm_given;
    double eps;
    int64_t inputs;
    const void *x, *w_ih; /* [N, inputs], [G, inputs]: if x·Wx is computed step by step; NULL: it is in `gates` */
    const void *w_hh, *b_x, *b_h, *w_hr;      /* [G, P] or [G, H / heads]; [G]; [G] or NULL; [P, H] or NULL */
    const void *parameters[PARAMETERS];       /* [H] */
    const void *matrices[PRODUCTS];           /* of the products inside the step: [rows, columns] */
    int64_t matrix_rows[PRODUCTS], matrix_columns[PRODUCTS];
    const void *norm_x, *norm_h, *norm_c, *norm_c_shift; /* [G], [G], [H], [H] */
    const void *initial[STATES];              /* the states before the first step: [B, P], [B, H], … */
    const void *reset_to[STATES];             /* the states after a reset, same shapes */
    /* the forward pass writes these, the backward pass reads them */
    void *gates;   /* [N, G]: in: x·Wx; out: the stored value of each gate */
    void *states[STATES]; /* at every step: y [N, P], then [N, H] each */
    void *hats;    /* norm: [N, G]: h·Wh normalised */
    void *slots[SLOTS]; /* [N, H]: other stored values; with a norm, NULL if `hats` contains it */
    void *inner[PRODUCTS]; /* results of the products inside the step: [N, parts · H] each */
    void *mean_x, *var_x; /* as for h */
    void *mean_h, *var_h; /* [N] (layer norm) or [T, G]; read if `norm_given` */
    void *mean_c, *var_c; /* [N] or [T, H] */
    /* the backward pass */
    const void *dy;             /* [N, P] */
    const void *dseen[STATES];  /* of the states other than h at every step: [N, H], or NULL; the first is NULL */
    void *dstates[STATES];      /* [B, P], [B, H], …: in: of the final states; out: of the initial states */
    void *dreset[STATES];       /* of the states after a reset; starts at zero */
    void *dgx, *dgh, *dsh;   /* [N, G]: of x·Wx as it enters the gates; of h·Wh; of h·Wh normalised (may be the same) */
    void *du, *u;            /* projection: [N, P] and [N, H] */
    void *dnc, *chat;        /* norm: [N, H]: gradient of the normalised c; the normalised c */
    void *dx;                /* norm: [N, G]: in: x·Wx; out: its gradient */
    void *dscale_x, *dscale_h, *dscale_c, *dshift_c; /* norm: [threads, G or H], starts at zero; sum over threads */
    void *dparameters[PARAMETERS];                   /* [threads, H], starts at zero; sum over threads */
    void *dinner[PRODUCTS], *ins[PRODUCTS]; /* gradients of the inner products; the inputs of these, [N, H] */
    void *work;              /* scratch memory: zoneout_work_size() bytes from the first multiple of 64 on */
} Loop;
#endif
