/* The recurrent loop over time, forward and backward pass: products, gates, noise and norms in one call.
 *
 * This is plain C with OpenMP. It includes only headers of the C library, so any compiler builds it in a second. The
 * same code is compiled for float and for double through `body.h`.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "loop.h"
#include "functions.h"

#pragma GCC visibility push(default) /* so that Python finds the symbols with any -fvisibility flag */

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* --- threads ------------------------------------------------------------------------------------ */

static _Thread_local int alone; /* this thread works on its own rows and waits for no other thread */

typedef void Task(void *arguments);

/* With a compiler that has no OpenMP of its own, TORCH_OPENMP calls torch's runtime by the names that gcc uses. */
#if defined(_OPENMP) || defined(TORCH_OPENMP)
extern int omp_get_thread_num(void), omp_get_num_threads(void);
INLINE int real_thread_id(void) { return omp_get_thread_num(); }
INLINE int real_thread_count(void) { return omp_get_num_threads(); }
#else
INLINE int real_thread_id(void) { return 0; }
INLINE int real_thread_count(void) { return 1; }
#endif

/* Run a task in `threads` threads at once; wait in it for the other threads. */
#if defined(_OPENMP)
static void in_threads(int64_t threads, Task *task, void *arguments) {
#pragma omp parallel num_threads((int)threads)
    task(arguments);
}
INLINE void wait_for_all(void) {
#pragma omp barrier
}
#elif defined(TORCH_OPENMP)
extern void GOMP_parallel(Task *task, void *arguments, unsigned threads, unsigned flags), GOMP_barrier(void);
static void in_threads(int64_t threads, Task *task, void *arguments) {
    GOMP_parallel(task, arguments, (unsigned)threads, 0);
}
INLINE void wait_for_all(void) { GOMP_barrier(); }
#else
static void in_threads(int64_t threads, Task *task, void *arguments) {
    (void)threads;
    task(arguments);
}
INLINE void wait_for_all(void) {}
#endif

INLINE int thread_id(void) { return alone ? 0 : real_thread_id(); }

INLINE int thread_count(void) { return alone ? 1 : real_thread_count(); }

INLINE void barrier(void) {
    if (!alone) wait_for_all();
}

/* Compute this thread's part of [0, n), split at multiples of `grain`. */
INLINE void share(int64_t n, int64_t grain, int64_t *from, int64_t *to) {
    int64_t blocks = (n + grain - 1) / grain, count = thread_count(), id = thread_id();
    *from = min64(n, blocks * id / count * grain);
    *to = min64(n, blocks * (id + 1) / count * grain);
}

/* --- Philox 4x32-10 ----------------------------------------------------------------------------- */

typedef uint64_t __attribute__((may_alias)) Pair; /* two words, the first in the low half */

/* Write the words of the counters (unit / 4, example, step, plane) for units [from, to). `from` is a multiple of 4.
 * Each counter has its own 64-bit lanes, so a shift separates the halves of a product. Bits above the low 32 are masked
 * only where they would matter. */
static void philox_words(uint32_t *words, int64_t from, int64_t to, uint64_t seed, uint32_t example, uint32_t step,
                         uint32_t plane) {
    const uint64_t low = 0xFFFFFFFFu;
    int64_t first = from / 4, count = (to - from + 3) / 4;
    Pair *out = (Pair *)words;
#pragma omp simd
    for (int64_t q = 0; q < count; q++) {
        uint64_t c0 = (uint64_t)(first + q), c1 = example, c2 = step, c3 = plane;
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < 10; round++) {
            uint64_t p0 = (c0 & low) * 0xD2511F53u, p1 = (c2 & low) * 0xCD9E8D57u;
            c0 = (p1 >> 32) ^ c1 ^ k0;
            c1 = p1;
            c2 = (p0 >> 32) ^ c3 ^ k1;
            c3 = p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        out[2 * q] = (c0 & low) | (c1 << 32);
        out[2 * q + 1] = (c2 & low) | (c3 << 32);
    }
}

/* Write the random words of a stream for units [from, to) of one row at one step. */
static void stream_words(const Stream *s, uint32_t *words, int64_t from, int64_t to, int64_t example, int64_t step) {
    uint32_t e = s->sees_example ? (uint32_t)example : 0, t = s->sees_step ? (uint32_t)step : 0;
    if (s->sees_unit) {
        philox_words(words, from, to, (uint64_t)*s->seed, e, t, (uint32_t)s->plane);
    } else {
        uint32_t one[4] __attribute__((aligned(8)));
        philox_words(one, 0, 1, (uint64_t)*s->seed, e, t, (uint32_t)s->plane);
        for (int64_t j = 0; j < to - from; j++) words[j] = one[0];
    }
}

typedef struct {
    const Stream *stream;
    const int64_t *steps, *examples;
    int64_t count, batch, each, units;
    uint8_t *out;
    int32_t *bits; /* in place of the mask: the 16 bits that a rate is compared with */
} Masks;

static void mask_task(void *arguments) {
    enum { BLOCK = 1024 };
    const Masks *m = arguments;
    const Stream *s = m->stream;
    int64_t blocks = (m->units + BLOCK - 1) / BLOCK, first, last;
    int shift = s->high ? 16 : 0;
    share(m->count * m->batch * blocks, 1, &first, &last);
    for (int64_t k = first; k < last; k++) {
        int64_t row = k / blocks, t = row / m->batch, from = k % blocks * BLOCK, to = min64(m->units, from + BLOCK);
        uint32_t words[BLOCK] __attribute__((aligned(64)));
        uint8_t *restrict keep = m->out ? m->out + row * m->units + from : NULL;
        const double *restrict rate = s->rate + from * s->stride;
        stream_words(s, words, from, to, m->examples[t * m->each + row % m->batch], m->steps[t]);
        if (m->bits) {
            for (int64_t j = 0; j < to - from; j++) m->bits[row * m->units + from + j] = (words[j] >> shift) & 0xFFFF;
        } else if (s->stride) {
            for (int64_t j = 0; j < to - from; j++) keep[j] = ((words[j] >> shift) & 0xFFFF) < rint(rate[j] * 65536);
        } else {
            uint32_t threshold = (uint32_t)rint(*rate * 65536);
            for (int64_t j = 0; j < to - from; j++) keep[j] = ((words[j] >> shift) & 0xFFFF) < threshold;
        }
    }
}

/* Write a mask, [count, batch, units]: 1 where the old value is kept. If `each` is 0, all steps share their examples.
 * Otherwise each step has its own examples, and `each` is the stride from one step to the next. */
void zoneout_mask(const Stream *s, const int64_t *steps, int64_t count, const int64_t *examples, int64_t batch,
                  int64_t each, int64_t units, int64_t threads, uint8_t *out) {
    Masks m = {s, steps, examples, count, batch, each, units, out, NULL};
    in_threads(threads, mask_task, &m);
}

/* Write the masks of several streams at one step, [streams, batch, units]. */
void zoneout_step_masks(const Stream *s, int64_t streams, int64_t step, const int64_t *examples, int64_t batch,
                        int64_t units, int64_t threads, uint8_t *out) {
    for (int64_t k = 0; k < streams; k++)
        zoneout_mask(s + k, &step, 1, examples, batch, 0, units, threads, out + k * batch * units);
}

/* Write the random bits of a stream, [count, batch, units]; all steps share their examples. */
void zoneout_bits(const Stream *s, const int64_t *steps, int64_t count, const int64_t *examples, int64_t batch,
                  int64_t units, int64_t threads, int32_t *bits) {
    Masks m = {s, steps, examples, count, batch, 0, units, NULL, bits};
    in_threads(threads, mask_task, &m);
}

INLINE int same_words(const Stream *a, const Stream *b) {
    return a->seed && b->seed && *a->seed == *b->seed && a->plane == b->plane && a->sees_step == b->sees_step &&
           a->sees_example == b->sees_example && a->sees_unit == b->sees_unit;
}

INLINE char *work_of(const Loop *l) { return (char *)(((intptr_t)l->work + 63) / 64 * 64); }

/* --- the same code for both types --------------------------------------------------------------- */

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define FLOATS 16
#define DOUBLES 8
#define TILE_ROWS 8
#define TILE_VECTORS 3
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#define FLOATS 8
#define DOUBLES 4
#define TILE_ROWS 6
#define TILE_VECTORS 2
#else
#define VECTOR_BYTES 16
#define FLOATS 4
#define DOUBLES 2
#define TILE_ROWS 6
#define TILE_VECTORS 2
#endif

/* Interleave two vectors: LOW their first halves, HIGH their second halves. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, numbers) __builtin_shufflevector(a, b, numbers)
#endif
#define LOW_2 0, 2
#define HIGH_2 1, 3
#define LOW_4 0, 4, 1, 5
#define HIGH_4 2, 6, 3, 7
#define LOW_8 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_8 4, 12, 5, 13, 6, 14, 7, 15
#define LOW_16 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_16 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define JOINED(a, b) a##b
#define NUMBERED(name, count) JOINED(name, count)

/* What becomes of the numbers that a product finds in its place. FIRST begins with them, so that a sum has the order of
 * its depth whatever its parts are. LAST adds them at the end, which rounds less where the parts are many. */
enum { REPLACED, FIRST, LAST };

#define REAL float
#define LOW NUMBERED(LOW_, FLOATS)
#define HIGH NUMBERED(HIGH_, FLOATS)
#define NAME(x) x##_float
#include "body.h"
#undef REAL
#undef LOW
#undef HIGH
#undef NAME

#define REAL double
#define LOW NUMBERED(LOW_, DOUBLES)
#define HIGH NUMBERED(HIGH_, DOUBLES)
#define NAME(x) x##_double
#include "body.h"

#pragma GCC visibility pop
