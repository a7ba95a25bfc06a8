/* Shared by all kernels: arguments, number types, noise, and one step of each built-in cell for one unit of one
 * row.
 *
 * Prepended to every source and compiled at run time, so no headers are needed. `arguments.py` fills the same
 * structs: change both together. Macros:
 *
 *   CELL                    0 LSTM, 1 GRU, 2 RNN with tanh, 3 RNN with ReLU
 *   GATES                   number of gates of that cell
 *   TYPE                    type of the input: 0 float, 1 bfloat16, 2 half
 *   FAST                    0: exp and tanh of the library; 1: fast approximations
 *   FEATURES                bit mask of the optional features of a loop, see below
 *   CELL_MODE, HIDDEN_MODE  modes of the two noise streams, if known at compile time
 *   ONE_RATE                1: all units of a stream have the same rate
 *
 * Words:
 *
 *   narrow     the type of the input; `widen` and `narrowed` convert it to and from float
 *   row        one example of the batch, or its values at one step
 *   cut        a reset lies between this step and the one before
 *   carried    a state that is passed to the next step: after its noise
 *   candidate  a state before its noise
 *   keep       the value of a mask: 1 keeps the old value (or sets zero); at evaluation the rate
 *   owed       the part of a gate's gradient that belongs to the step before, because the gate was held
 *   early      loaded into a register one step before its use
 */
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define LSTM (CELL == 0)
#define GRU (CELL == 1)
#define RELU (CELL == 3)
/* SHARED: drawn, with the bits of the cell's mask; GIVEN: read from memory */
enum { OFF, DRAWN, EXPECTED, SHARED, GIVEN };

struct Stream { /* one stream of noise */
    int mode, zero, hold, sees_step, sees_example, sees_unit, high;
    u32 plane;
    const i64 *seed;
    const double *rate;
    i64 stride; /* of the rates: 0 if one rate serves all units */
};

/* rows are in the caller's order, [time][batch]; row b is processed in its first lengths[b] steps, or in all */
struct Loop {
    i64 steps, batch, hidden, outputs, first_step, reverse;
    const i64 *lengths, *examples;
    const u8 *resets;
    Stream cell, hidden_state, update;
    const void *scale_h, *w_hh, *b_x, *b_h, *h0, *reset_h;
    const float *c0, *reset_c;
    void *gates, *y;
    float *c, *gh;
    /* backward pass */
    const void *dy;
    const float *dcells;
    float *dh, *dc, *dreset_h, *dreset_c;
    void *dgx, *dsh;
};

struct Norm { /* norms of h·Wh and c, for kernels that run all steps */
    double eps;
    const float *scale_h, *scale_c, *shift_c;
    float *mean_h, *var_h, *mean_c, *var_c;
    /* backward pass */
    void *dgh;
    /* norm of c: the gradient and the normalised values [N, H], or the sums of its scale and shift [H] */
    float *dnc, *chat, *dscale_c, *dshift_c;
    float *db_x, *db_h; /* gradients of the biases, summed */
};

/* --- numbers ------------------------------------------------------------------------------------ */

#if TYPE == 0
typedef float narrow;
__device__ __forceinline__ float widen(narrow v) { return v; }
__device__ __forceinline__ narrow narrowed(float v) { return v; }
#elif TYPE == 1
typedef u16 narrow;
__device__ __forceinline__ float widen(narrow v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ narrow narrowed(float v) {
#if __CUDA_ARCH__ < 800 /* no instruction for it before sm_80 */
    u32 bits = __float_as_uint(v);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : (narrow)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#else
    narrow out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(v));
    return out;
#endif
}
#else
typedef u16 narrow;
__device__ __forceinline__ float widen(narrow v) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(v));
    return out;
}
__device__ __forceinline__ narrow narrowed(float v) {
    narrow out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(v));
    return out;
}
#endif

/* Pack two values into one word, by one instruction. If 16-bit registers were shifted together, the assembler of
 * CUDA 13.0 left out a word at some sizes. */
template <int KIND> /* as TYPE */
__device__ __forceinline__ u32 pair_as(float low, float high) {
    u32 out;
    if (KIND == 1)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

#if TYPE
__device__ __forceinline__ u32 pair(float low, float high) {
#if __CUDA_ARCH__ < 800
    return (u32)narrowed(low) | (u32)narrowed(high) << 16;
#else
    return pair_as<TYPE>(low, high);
#endif
}
#endif

#if FAST
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float tanh_of(float x) {
    x = fminf(fmaxf(x, -15.0f), 15.0f);
    return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x));
}
#else
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
#endif

/* Faster approximations, for loops in which every step waits for them. */
#if TYPE
/* One instruction instead of four. Its error is that of rounding to half precision. */
__device__ __forceinline__ float tanh_approx(float x) {
    float out;
    asm("tanh.approx.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
__device__ __forceinline__ float sigmoid_approx(float x) { return fmaf(tanh_approx(0.5f * x), 0.5f, 0.5f); }
#else
/* 1 / (1 + 2^x), which is right for large and small x too. */
__device__ __forceinline__ float logistic(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(out + 1.0f));
    return out;
}
__device__ __forceinline__ float sigmoid_approx(float x) { return logistic(x * -1.4426950408889634f); }
__device__ __forceinline__ float tanh_approx(float x) { return fmaf(logistic(x * 2.8853900817779268f), -2.0f, 1.0f); }
#endif

__device__ __forceinline__ float mix(float value, float old, float keep) {
    return keep <= 0 ? value : keep >= 1 ? old : fmaf(keep, old, (1 - keep) * value);
}
__device__ __forceinline__ float drop_out(float value, float drop) { return drop >= 1 ? 0.0f : value * (1 - drop); }

/* A value that is loaded one step before its use. It has a register of its own: the compiler would otherwise pack
 * two values into one register, and wait for both loads to do so. */
struct EarlyLoad {
    u32 bits;
};
__device__ __forceinline__ EarlyLoad load_early(const narrow *from) {
    EarlyLoad out;

#if TYPE
    asm volatile("ld.global.u16 %0, [%1];" : "=r"(out.bits) : "l"(from));
#else
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(out.bits) : "l"(from));
#endif
    return out;
}
__device__ __forceinline__ EarlyLoad load_early(const u8 *from) {
    EarlyLoad out;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(out.bits) : "l"(from));
    return out;
}
__device__ __forceinline__ float widen(EarlyLoad v) {

#if TYPE
    return widen((narrow)v.bits);
#else
    return __uint_as_float(v.bits);
#endif
}

/* --- products ----------------------------------------------------------------------------------- */

__device__ __forceinline__ u32 tf32_bits(float v) {
    u32 out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(v));
    return out;
}

#define MULTIPLY(how)                                                                                              \
    asm("mma.sync.aligned." how " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                           \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

template <int KIND> /* as TYPE */
__device__ __forceinline__ void multiply_as(float *sum, const u32 *a, u32 b0, u32 b1) {
    if (KIND == 0)
        MULTIPLY("m16n8k8.row.col.f32.tf32.tf32.f32");
    else if (KIND == 1)
        MULTIPLY("m16n8k16.row.col.f32.bf16.bf16.f32");
    else
        MULTIPLY("m16n8k16.row.col.f32.f16.f16.f32");
}
__device__ __forceinline__ void multiply(float *sum, const u32 *a, u32 b0, u32 b1) {
    multiply_as<TYPE>(sum, a, b0, b1);
}

/* --- powers of two ---------------------------------------------------------------------------- */

/* 2^e, if that is a normal float. */
__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float((u32)(e + 127) << 23); }
/* The exponent of the power of two that scales a value to between 2^14 and 2^15. `size` is the bits of the value
 * without the sign. Half precision has all its bits there and in the 28 powers of two below. From -114 (not finite)
 * to 141 (zero). */
__device__ __forceinline__ int scale_exponent(u32 size) { return 14 + 127 - (int)(size >> 23); }
/* The bits of a float without the sign. They have the order of the magnitudes; NaN is the largest. */
__device__ __forceinline__ u32 magnitude_bits(float v) { return __float_as_uint(v) & 0x7FFFFFFF; }
/* The largest value in a warp. */
__device__ __forceinline__ u32 warp_max(u32 v) {
    asm volatile("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(v) : "r"(v));
    return v;
}

/* --- rows --------------------------------------------------------------------------------------- */

/* `t` counts processed steps, `length` is the length of the row. A reversed row begins at its last position. */
__device__ __forceinline__ i64 length_of(const Loop &l, i64 row) { return l.lengths ? l.lengths[row] : l.steps; }
__device__ __forceinline__ i64 position(const Loop &l, i64 t, i64 length) { return l.reverse ? length - 1 - t : t; }
__device__ __forceinline__ i64 row_index(const Loop &l, i64 t, i64 row, i64 length) {
    return position(l, t, length) * l.batch + row;
}

__device__ __forceinline__ u32 mask_step(const Loop &l, i64 t, i64 length) {
    return (u32)(l.first_step + position(l, t, length));
}

/* True if a reset lies between a step and the one before. Resets lie before positions, so a reversed row uses the
 * reset of the next higher position. */
__device__ __forceinline__ bool cut_at(const Loop &l, i64 t, i64 row, i64 length) {
    if (!l.resets || (l.reverse && t == 0)) return false;
    return l.resets[(position(l, t, length) + (l.reverse ? 1 : 0)) * l.batch + row];
}

/* A state before the first step, or after a reset. */
__device__ __forceinline__ float start_h(const Loop &l, bool cut, i64 at) {
    return widen(((const narrow *)(cut ? l.reset_h : l.h0))[at]);
}
__device__ __forceinline__ float start_c(const Loop &l, bool cut, i64 at) { return (cut ? l.reset_c : l.c0)[at]; }

/* --- noise -------------------------------------------------------------------------------------- */

struct Noise { /* a stream, as one unit sees it */
    u32 threshold;
    float rate;
    u64 seed;
};

struct RawNoise { /* rate and seed as they are in memory: loaded early, long before they are used */
    double rate;
    u64 seed;
};

__device__ __forceinline__ RawNoise raw_noise_of(const Stream &s, i64 unit) {
    RawNoise g = {0.0, 0};
    if (s.mode == OFF) return g;
    g.rate = s.rate[unit * s.stride];
    if (s.mode == DRAWN) g.seed = (u64)*s.seed;
    return g;
}

__device__ __forceinline__ Noise noise_of(const RawNoise &g) {
    return {(u32)rint(g.rate * 65536.0), (float)g.rate, g.seed};
}

__device__ __forceinline__ Noise noise_of(const Stream &s, i64 unit) { return noise_of(raw_noise_of(s, unit)); }

/* Philox 4x32-10: one draw makes the random words of four units. */
__device__ __forceinline__ void philox(u32 *word, u64 seed, u32 c0, u32 c1, u32 c2, u32 c3) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
        u32 high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
        c0 = high1 ^ c1 ^ k0, c1 = low1;
        c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

/* The random word of one unit. */
__device__ __forceinline__ u32 word_of(const Stream &s, u64 seed, u32 unit, u32 example, u32 step) {
    u32 word[4];
    unit = s.sees_unit ? unit : 0;
    philox(word, seed, unit >> 2, s.sees_example ? example : 0, s.sees_step ? step : 0, s.plane);
    u32 low = unit & 1 ? word[1] : word[0], high = unit & 1 ? word[3] : word[2];
    return unit & 2 ? high : low;
}

__device__ __forceinline__ float keep_of(const Stream &s, const Noise &n, u32 word) {
    if (s.mode == EXPECTED) return n.rate;
    return ((word >> (s.high ? 16 : 0)) & 0xFFFF) < n.threshold ? 1.0f : 0.0f;
}

__device__ __forceinline__ bool same_words(const Stream &a, const Noise &na, const Stream &b, const Noise &nb) {
    return a.plane == b.plane && a.sees_step == b.sees_step && a.sees_example == b.sees_example &&
           a.sees_unit == b.sees_unit && na.seed == nb.seed;
}

struct Noises {
    Noise cell, hidden, update;
};
struct Keep { /* 1: the old value (or zero) replaces the new one; at evaluation, the probability of that */
    float cell, hidden, update;
};

__device__ __forceinline__ Noises noises_of(const Loop &l, i64 unit) {
    return {noise_of(l.cell, unit), noise_of(l.hidden_state, unit), noise_of(l.update, unit)};
}

__device__ __forceinline__ Keep keeps_of(const Loop &l, const Noises &n, u32 unit, u32 example, u32 step) {
    Keep k = {0.0f, 0.0f, 0.0f};
    u32 word = 0;
    bool drawn = false;
    if (l.cell.mode) {
        if (l.cell.mode == DRAWN) word = word_of(l.cell, n.cell.seed, unit, example, step), drawn = true;
        k.cell = keep_of(l.cell, n.cell, word);
    }
    if (l.hidden_state.mode) {
        if (l.hidden_state.mode == DRAWN && !(drawn && same_words(l.cell, n.cell, l.hidden_state, n.hidden)))
            word = word_of(l.hidden_state, n.hidden.seed, unit, example, step);
        k.hidden = keep_of(l.hidden_state, n.hidden, word);
    }
    if (l.update.mode) {
        if (l.update.mode == DRAWN) word = word_of(l.update, n.update.seed, unit, example, step);
        k.update = keep_of(l.update, n.update, word);
    }
    return k;
}

/* FEATURES: the optional features that a loop uses, one bit each. Code for absent ones is compiled away. 0 is
 * zoneout of rows of full length, forward in time. */
#ifndef FEATURES
#define FEATURES 127
#endif
#define HAS_LENGTHS (FEATURES & 1)
#define HAS_RESETS (FEATURES & 2)
#define HAS_SCALES (FEATURES & 4) /* variational dropout of h */
#define HAS_DCELLS (FEATURES & 8) /* gradients of every c */
#define HAS_REVERSE (FEATURES & 16)
#define HAS_UPDATE (FEATURES & 32) /* recurrent dropout */
#define HAS_ZERO (FEATURES & 64) /* state dropout */
#ifdef CELL_MODE /* the modes are known: zoneout only, whose masks see step, example and unit, with one seed */
#define KNOWN_MODES 1
#else
#define KNOWN_MODES 0
#endif
__device__ __forceinline__ void simplify(Loop &l) {
    if (!HAS_LENGTHS) l.lengths = nullptr;
    if (!HAS_RESETS) l.resets = nullptr;
    if (!HAS_SCALES) l.scale_h = nullptr;
    if (!HAS_DCELLS) l.dcells = nullptr;
    if (!HAS_REVERSE) l.reverse = 0;
    if (!HAS_UPDATE) l.update.mode = OFF, l.update.hold = 0;
    if (!HAS_ZERO) l.cell.zero = l.hidden_state.zero = 0;
#if KNOWN_MODES
    l.cell.mode = CELL_MODE, l.hidden_state.mode = HIDDEN_MODE == SHARED ? DRAWN : HIDDEN_MODE;
    l.cell.sees_step = l.cell.sees_example = l.cell.sees_unit = 1;
    l.hidden_state.sees_step = l.hidden_state.sees_example = l.hidden_state.sees_unit = 1;
    l.cell.high = 0, l.hidden_state.high = HIDDEN_MODE != SHARED;
#endif
#if ONE_RATE /* no unit has its own rate */
    l.cell.stride = l.hidden_state.stride = l.update.stride = 0;
#endif
}

/* --- one step of one unit, forward pass ------------------------------------------------------- */

/* Sums of two products are written as fmaf. The compiler would otherwise choose which product is rounded, depending
 * on the code around it, and the bits of a row would depend on the tiling of its batch. */

__device__ __forceinline__ float carried_h(const Loop &l, float value, float old, const Keep &k) {
    if (!l.hidden_state.mode) return value;
    return l.hidden_state.zero ? drop_out(value, k.hidden) : mix(value, old, k.hidden);
}

__device__ __forceinline__ float lstm_candidate(const Loop &l, float i, float f, float g, float old, const Keep &k) {
    float c = fmaf(f, old, l.update.mode ? drop_out(i * g, k.update) : i * g);
    return l.cell.mode && l.cell.zero ? drop_out(c, k.cell) : c;
}

__device__ __forceinline__ float carried_c(const Loop &l, float value, float old, const Keep &k) {
    return l.cell.mode && !l.cell.zero ? mix(value, old, k.cell) : value;
}

/* --- one step of one unit, backward pass ------------------------------------------------------ */

/* Return the gradient of the candidate h. `dh` becomes the part that goes directly to the h before. */
__device__ __forceinline__ float carried_h_back(const Loop &l, float &dh, const Keep &k) {
    float total = dh, keep = l.hidden_state.mode ? k.hidden : 0.0f;
    dh = l.hidden_state.mode && !l.hidden_state.zero ? total * keep : 0.0f;
    return total * (1 - keep);
}

/* Compute the gradients of the gates i, f and g from that of the candidate c. `dc` becomes that of the c before. */
__device__ __forceinline__ void lstm_gates_back(const Loop &l, float *d, float i, float f, float g, float old,
                                                float dcandidate, float &dc, const Keep &k) {
    float keep = l.cell.mode ? k.cell : 0.0f, direct = 0.0f;
    if (l.cell.zero) {
        dcandidate = (dcandidate + dc) * (1 - keep);
    } else {
        dcandidate += dc * (1 - keep);
        direct = dc * keep;
    }
    float du = l.update.mode ? dcandidate * (1 - k.update) : dcandidate;
    d[0] = du * g * i * (1 - i);
    d[1] = dcandidate * old * f * (1 - f);
    d[2] = du * i * (1 - g * g);
    dc = direct + dcandidate * f;
}

/* Return the gradient of the output gate. `owed` becomes the part that belongs to the held gate of the step before. */
__device__ __forceinline__ float lstm_output_back(const Loop &l, float dgate, float o, bool first, float &owed,
                                                  const Keep &k) {
    if (l.update.mode && l.update.hold) {
        float keep = first ? 0.0f : k.update, now = dgate * (1 - keep) + owed;
        owed = dgate * keep;
        dgate = now;
    }
    return dgate * o * (1 - o);
}

/* `v` is the part of the gate n in h·Wh + b. */
__device__ __forceinline__ void gru_back(const Loop &l, float *dx, float *ds, float r, float z, float n, float v,
                                         float old, float d, float &dh, const Keep &k) {
    float du = l.update.mode ? d * (1 - k.update) : d, back = du * (1 - z) * (1 - n * n);
    ds[0] = dx[0] = back * v * r * (1 - r);
    ds[1] = dx[1] = (d * old - du * n) * z * (1 - z);
    dx[2] = back;
    ds[2] = back * r;
    dh += d * z;
}
