/* Scalar functions in a form that compilers vectorise, for float and for double.
 *
 * The float versions are our own, because calls to the C library prevent vectorisation. The double versions use the C
 * library.
 */
#ifndef ZONEOUT_FUNCTIONS_H
#define ZONEOUT_FUNCTIONS_H
#include <math.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

/* exp(x) = two · (1 + rest), with two a power of 2 and |rest| < 0.42, for x from -87.3 to 89. From 88.4 on, two is
 * infinite. */
typedef struct { float two, rest; } Power;

INLINE Power power_of_e(float x) {
    float n = rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int32_t i; float f; } two = {((int32_t)n + 127) << 23};
    Power e = {two.f, p * r * r + r};
    return e;
}

/* exp is 0 below the normal numbers, and infinity above the largest number. */
INLINE float exp_narrow_float(float arg) {
    float x = arg < -87.3f ? -87.3f : arg;
    x = x > 88.3f ? 88.3f : x;
    Power e = power_of_e(x);
    float y = (e.rest + 1.0f) * e.two;
    y = arg < -87.3f ? 0.0f : y;
    return arg > 88.7f ? INFINITY : y;
}

/* Saturated gates are exact: 1 + exp(-x) is 1 or infinite there. */
INLINE float sigmoid_float(float x) {
    float arg = -x < -87.3f ? -87.3f : -x;
    arg = arg > 89.0f ? 89.0f : arg;
    Power e = power_of_e(arg);
    return 1.0f / (1.0f + (e.rest + 1.0f) * e.two);
}

/* (exp(2 a) - 1) / (exp(2 a) + 1), without a difference of close numbers: two is 1 where a is small. */
INLINE float tanh_float(float x) {
    float a = fabsf(x);
    a = a > 9.1f ? 9.1f : a;
    Power e = power_of_e(2.0f * a);
    float less = e.two * e.rest + (e.two - 1.0f); /* exp(2 a) - 1 */
    return copysignf(less / (less + 2.0f), x);
}

INLINE double sigmoid_double(double x) { return 1.0 / (1.0 + exp(-x)); }

/* exp for all numbers. exp_narrow_float is correct only up to 88.3, which is enough for the functions above. */
INLINE float exp_float(float x) {
    float e = exp_narrow_float(x > 88.0f ? x - 1.0f : x);
    return x > 88.0f ? e * 2.71828183f : e;
}

/* log(x) = n log 2 + log(m) with m in [sqrt(1/2), sqrt(2)). Subnormal numbers count as zero. */
INLINE float log_float(float x) {
    union { float f; int32_t i; } bits = {x};
    int32_t shift = (bits.i - 0x3f3504f3) >> 23; /* sqrt(1/2) */
    bits.i -= (int32_t)((uint32_t)shift << 23);
    float n = (float)shift, r = bits.f - 1.0f, z = r * r;
    float p = 7.0376836292e-2f;
    p = p * r - 1.1514610310e-1f;
    p = p * r + 1.1676998740e-1f;
    p = p * r - 1.2420140846e-1f;
    p = p * r + 1.4249322787e-1f;
    p = p * r - 1.6668057665e-1f;
    p = p * r + 2.0000714765e-1f;
    p = p * r - 2.4999993993e-1f;
    p = p * r + 3.3333331174e-1f;
    p = p * r * z - 2.12194440e-4f * n - 0.5f * z;
    float y = r + p + 0.693359375f * n;
    y = x < 1.17549435e-38f ? -INFINITY : y;
    y = x < 0.0f ? NAN : y;
    return x <= 3.40282347e38f ? y : x; /* infinity and NaN are returned unchanged */
}

/* log(1 + exp(x)), or x itself above 20, as in torch. */
INLINE float softplus_float(float x) {
    float e = exp_narrow_float(-fabsf(x)), u = 1.0f + e;
    float rest = log_float(u) + (e - (u - 1.0f)) / u; /* log(1 + e), corrected for the rounding of 1 + e */
    float y = (x > 0.0f ? x : 0.0f) + rest;
    y = x > 20.0f ? x : y;
    return x == x ? y : x;
}

INLINE double softplus_double(double x) { return x > 20 ? x : (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }

/* The rest are the C library's. */
INLINE float sqrt_float(float x) { return sqrtf(x); }
INLINE float abs_float(float x) { return fabsf(x); }
INLINE double tanh_double(double x) { return tanh(x); }
INLINE double exp_double(double x) { return exp(x); }
INLINE double log_double(double x) { return log(x); }
INLINE double sqrt_double(double x) { return sqrt(x); }
INLINE double abs_double(double x) { return fabs(x); }

/* The names in the C text of operations (definition/operations.py); NAME adds the type of the numbers. */
#define SIGMOID(x) NAME(sigmoid)(x)
#define TANH(x) NAME(tanh)(x)
#define EXP(x) NAME(exp)(x)
#define LOG(x) NAME(log)(x)
#define SQRT(x) NAME(sqrt)(x)
#define SOFTPLUS(x) NAME(softplus)(x)
#define ABS(x) NAME(abs)(x)
#define RELU(x) ((x) < 0 ? 0 : (x)) /* NaN is returned unchanged */
#define SIGN(x) ((x) > 0 ? 1 : (x) < 0 ? -1 : 0)
#define MINIMUM(a, b) ((a) < (b) || (a) != (a) ? (a) : (b)) /* NaN if either is NaN, as in torch */
#define MAXIMUM(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))

/* The noise rules. At 0 and 1 they select, so that a NaN does not reach a unit that keeps its value. */
#define MIX(new, old, keep) ((keep) <= 0 ? (new) : (keep) >= 1 ? (old) : (1 - (keep)) * (new) + (keep) * (old))
#define LESS(value, drop) ((drop) >= 1 ? 0 : (value) * (1 - (drop)))
#define ALSO(value, old, share) ((share) <= 0 ? (value) : (value) + (share) * (old))
#endif
