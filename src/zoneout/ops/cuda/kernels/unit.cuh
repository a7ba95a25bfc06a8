/* Any cell: the values of one unit, the functions that a generated step calls, and the noise of up to four states.
 *
 * Prepended to cell_steps.cu and diagonal.cu, after units.cuh, and to small_cell.cu and persistent_cell.cu. The
 * text of the generated step (definition/cuda.py) is inserted below. It defines the cell's sizes as macros:
 *
 *   GATES, STATES, PARAMETERS, SLOTS   counts; a slot is a stored value beside the gates
 *   PRODUCTS, LEVELS                   products inside the step, and their levels of dependence
 *   HELD                               storage of the gate that may be held: a gate, or GATES + a slot; -1: none
 *   APART                              1: h·Wh is not simply added to x·Wx
 *   RECURRENT                          1: the cell has a matrix for h
 *   MASKS                              1: masks are given, and may need gradients
 *
 * With APPROXIMATE the fastest functions are used, since every step waits for them.
 */

struct Unit { /* values of one unit of one row at one step; the fields of ops/cpu/step.h */
    float gate[8], r[8], bias_x[8], bias_r[8];
    float old[4], made[4]; /* the states before and after the step */
    float zone[4], zero[4], drop[4], add[4], update, hold, held;
    float parameter[8], slot[2];
    float dstate[4], dy, owed, dx[8], dr[8], dparameter[8];
    float dzone[4], dzero[4], ddrop[4], dadd[4], dupdate, dhold; /* gradients of given masks */
    float in[16], inner[32], din[16], dinner[32];                /* products inside the step: inputs and results */
};

/* --- the vocabulary of a step -------------------------------------------------------------------- */

#define REAL float
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#if FAST
__device__ __forceinline__ float exp_of(float x) { return __expf(x); }
#else
__device__ __forceinline__ float exp_of(float x) { return expf(x); }
#endif
__device__ __forceinline__ float softplus_of(float x) {                        /* x itself above 20, as in torch */
    return x > 20.0f ? x : fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))) + (x - x); /* NaN stays NaN */
}
#if APPROXIMATE
#define SIGMOID(x) sigmoid_approx(x)
#define TANH(x) tanh_approx(x)
#else
#define SIGMOID(x) sigmoid(x)
#define TANH(x) tanh_with_nan(x)
#endif
#define EXP(x) exp_of(x)
#define LOG(x) logf(x)
#define SQRT(x) sqrtf(x)
#define SOFTPLUS(x) softplus_of(x)
#define ABS(x) fabsf(x)
#undef RELU                            /* the name of a built-in cell in common.cuh */
#define RELU(x) ((x) < 0 ? 0.0f : (x)) /* NaN stays NaN */
#define SIGN(x) ((x) > 0 ? 1.0f : (x) < 0 ? -1.0f : 0.0f)
#define MINIMUM(a, b) ((a) < (b) || (a) != (a) ? (a) : (b)) /* NaN if either is NaN */
#define MAXIMUM(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define MIX(value, old, keep) mix(value, old, keep)
#define LESS(value, drop) drop_out(value, drop)
#define ALSO(value, old, share) ((share) <= 0 ? (value) : (value) + (share) * (old))
/* fminf and fmaxf drop a NaN, so tanh_of would hide it. */
__device__ __forceinline__ float tanh_with_nan(float x) { return x == x ? tanh_of(x) : x; }

#undef GATES /* of a built-in cell; the text of the step defines its own */
/* The functions of the cell's step stand here. */

/* --- arguments -------------------------------------------------------------------------------- */

/* In addition to Loop, for any cell. State 0 is h; entry 0 of states, initial and reset is unused. */
struct CellArguments {
    Stream state[4], update;
    const float *initial[4], *reset[4]; /* [B, H] */
    float *states[4], *slot[2];         /* [N, H] */
    const float *parameter[8];          /* [H] */
    const float *dseen[4];              /* [N, H]: gradients of the states at every step */
    float *dstate[4], *dreset[4];       /* [B, H] */
    float *dparameter[8];               /* [B, H]: sums over the steps of each row */
    /* cell_steps.cu; a head is `head_units` units (D below) with a matrix of their own */
    float *h;             /* [B, H]: the carried h in float32 */
    narrow *h_in;         /* [B, h_pitch]: h as it enters the product of the next step */
    const float *product; /* [heads, B, G·D]: h·Wh */
    float *owed;          /* [B, H]: gradient of the held gate, for the step before */
    narrow *d_in;         /* [B, heads, G, D]: gradients as the product reads them; NULL: it reads dsh in place */
    /* [heads or splits, B, rec_pitch]: gradient of the h that entered the next step, as sums that are not yet added */
    const float *rec;
    i64 head_units, h_pitch, rec_pitch, splits; /* splits: the number of these sums, if there is one head */
    /* products inside the step: inputs [B, in_pitch], results [N, parts·H], gradients of inputs [B, din_pitch]. If
     * the rows of a step are not adjacent (`gathered`), products write `part` and read `d_part`, both [B, parts·H] */
    narrow *in[16];
    float *inner[16], *part[16];
    const float *din[16];
    narrow *dinner[16], *d_part[16], *ins[16];
    i64 in_pitch, din_pitch, gathered;
    const narrow *matrix[16]; /* small_cell.cu: of each product, [parts·H, H] */
    /* cell_steps.cu: given masks [N, H] and their gradients. `given`: of the streams of mode GIVEN (index 4: the
     * update); `dropped`: leave the new value of a state out; `added`: add the old value */
    const float *given[5], *dropped[4], *added[4];
    float *dgiven[5], *ddropped[4], *dadded[4];
};

#ifndef PRODUCTS
#define PRODUCTS 0
#endif
#define EACH_GATE _Pragma("unroll") for (int q = 0; q < GATES; q++)
#define EACH_STATE _Pragma("unroll") for (int k = 0; k < STATES; k++)
#define EACH_STREAM _Pragma("unroll") for (int k = 0; k <= STATES; k++) /* of the states, then the update's */
#define EACH_SLOT _Pragma("unroll") for (int k = 0; k < SLOTS; k++)
#define EACH_PARAMETER _Pragma("unroll") for (int k = 0; k < PARAMETERS; k++)
#define EACH_PRODUCT _Pragma("unroll") for (int k = 0; k < PRODUCTS; k++)
#define EACH_PART _Pragma("unroll") for (int q = 0; q < product_parts(k); q++) /* of product k */

/* --- noise ---------------------------------------------------------------------------------------- */

/* STREAM0 to STREAM3 are defined if the only noise is zoneout whose masks see step, example and unit, with one
 * seed. They say of each state: the mode, plus 4 if it uses the high half of the word, plus 8 if it uses the word
 * of the state before. */
#ifdef STREAM0
#define KNOWN_STREAMS 1
__device__ __forceinline__ constexpr int stream_known(int k) {
    return k == 0 ? STREAM0 : k == 1 ? STREAM1 : k == 2 ? STREAM2 : k == 3 ? STREAM3 : 0;
}
#else
#define KNOWN_STREAMS 0
#endif

__device__ __forceinline__ void set_state_mask(Unit &u, int k, const Stream &s, float keep) {
    if (s.zero)
        u.zero[k] = keep;
    else
        u.zone[k] = keep;
}

/* A held gate takes its value of the step before, if the row has one. */
__device__ __forceinline__ void set_update_mask(Unit &u, const Stream &s, float keep, bool first) {
    u.update = keep;
    u.hold = s.hold && !first ? keep : 0.0f;
}

__device__ __forceinline__ const Stream &stream_of(const CellArguments &o, int k) {
    return k < STATES ? o.state[k] : o.update;
}

struct Streams { /* the streams of the states, then that of the update, as one unit sees them */
    Noise noise[STATES + 1];
};

__device__ __forceinline__ Streams streams_of(const CellArguments &o, i64 unit) {
    Streams n;
    EACH_STREAM n.noise[k] = noise_of(stream_of(o, k), unit);
    return n;
}

/* True if a stream uses the random word of the stream before, which must have been drawn. */
__device__ __forceinline__ bool shares_word(const CellArguments &o, const Streams &n, int k) {
#if KNOWN_STREAMS
    return stream_known(k) & 8;
#else
    return same_words(stream_of(o, k - 1), n.noise[k - 1], stream_of(o, k), n.noise[k]);
#endif
}

struct Masks { /* by stream: 1 where the old value (or zero) is used; at evaluation, the probability of that */
    float of[STATES + 1];
};

__device__ __forceinline__ void set_masks(Unit &u, const CellArguments &o, const Masks &masks, bool first) {
#pragma unroll
    for (int k = 0; k < STATES; k++) set_state_mask(u, k, o.state[k], masks.of[k]);
    set_update_mask(u, o.update, masks.of[STATES], first);
}

__device__ __forceinline__ Masks draw_masks(const CellArguments &o, const Streams &n, u32 unit, u32 example, u32 step) {
    Masks masks = {};
    u32 word = 0;
    int drawn = -1; /* the stream of `word` */
#pragma unroll
    for (int k = 0; k <= STATES; k++) {
        const Stream &s = stream_of(o, k);
        if (s.mode == OFF) continue;
        if (s.mode == DRAWN) {
            if (!(k && drawn == k - 1 && shares_word(o, n, k)))
                word = word_of(s, n.noise[k].seed, unit, example, step);
            drawn = k;
        }
        masks.of[k] = keep_of(s, n.noise[k], word);
    }
    return masks;
}

/* Switch off what FEATURES says is absent. */
__device__ __forceinline__ void simplify(CellArguments &o) {
    if (!HAS_UPDATE) o.update.mode = OFF, o.update.hold = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (!HAS_ZERO) o.state[k].zero = 0;
        if (!HAS_DCELLS) o.dseen[k] = nullptr;
#if KNOWN_STREAMS
        o.state[k].mode = stream_known(k) & 3, o.state[k].high = stream_known(k) & 4, o.state[k].zero = 0;
        o.state[k].sees_step = o.state[k].sees_example = o.state[k].sees_unit = 1;
#endif
    }
#if KNOWN_STREAMS
    o.update.mode = OFF, o.update.hold = 0;
#endif
}

/* --- the states before a step --------------------------------------------------------------------- */

__device__ __forceinline__ const float *start_of(const CellArguments &o, int k, bool cut, i64 at) {
    return (cut ? o.reset[k] : o.initial[k]) + at;
}

/* A state before the first step, or after a reset; `at`: row and unit. */
__device__ __forceinline__ float start_at(const Loop &l, const CellArguments &o, int k, bool cut, i64 at) {
    return k ? *start_of(o, k, cut, at) : start_h(l, cut, at);
}

/* The values of a unit that are the same at all steps. */
__device__ __forceinline__ Unit unit_of(const Loop &l, const CellArguments &o, i64 unit) {
    Unit u = {};
    EACH_PARAMETER u.parameter[k] = o.parameter[k][unit];
    EACH_GATE {
        if (l.b_x) u.bias_x[q] = widen(((const narrow *)l.b_x)[q * l.hidden + unit]);
        if (l.b_h) u.bias_r[q] = widen(((const narrow *)l.b_h)[q * l.hidden + unit]);
    }
    return u;
}

/* The stored value of the gate that may be held. */
#if HELD >= 0 && defined(VECTOR)
__device__ __forceinline__ Units held_at(const Loop &l, const CellArguments &o, i64 at, i64 j) {
#if HELD < GATES
    return load((const narrow *)l.gates + (at * GATES + HELD) * l.hidden + j);
#else
    return load(o.slot[HELD - GATES] + at * l.hidden + j);
#endif
}
#endif
