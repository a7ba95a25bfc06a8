/* Optimizers: all parameters in one launch, each number read and written once.
 *
 * Compiled with RULE (0 SGD with momentum, 1 Adam, 2 RMSProp) and PAPER (the paper's form of the rule). `optimizers.py` has
 * the same rules in torch calls, and says what they are.
 */
#define MOST 64 /* tensors of a launch */

struct Tensors {
    float *p[MOST], *g[MOST], *first[MOST], *second[MOST]; /* parameters, gradients or steps, and what a rule remembers */
    i64 size[MOST], end[MOST];                             /* numbers of each, and blocks of all up to it */
    u64 decays;                                            /* bits: whose weights decay */
};

struct Rule {
    float mean_new, square_kept, square_new, momentum; /* shares of a mean and of a mean square */
    float l2;                                          /* share of the parameters in the gradients */
    const double *factor, *eps, *by, *keep; /* of the gradients, or NULL; of the steps; of weights that decay, or NULL */
};

/* The numbers that a thread has: every 256th of a block's 4096. */
#define EACH_NUMBER                                                             \
    int which = 0;                                                              \
    while (blockIdx.x >= t.end[which]) which++;                                 \
    const i64 begin = (blockIdx.x - (which ? t.end[which - 1] : 0)) * 4096;     \
    _Pragma("unroll 4") for (int k = 0; k < 16; k++)                            \
        if (i64 i = begin + k * 256 + threadIdx.x; i < t.size[which])

/* Gradients become steps. */
extern "C" __global__ void __launch_bounds__(256) advance(const Tensors t, const Rule r) {
    const float factor = r.factor ? (float)*r.factor : 1.0f, eps = (float)*r.eps;
    EACH_NUMBER {
        float g = t.g[which][i] * factor;
        if (r.l2 != 0.0f) g += r.l2 * t.p[which][i];
        float step = g;
#if RULE == 1
        float mean = t.first[which][i], square = t.second[which][i];
        mean += r.mean_new * (g - mean), square = r.square_kept * square + r.square_new * g * g;
        t.first[which][i] = mean, t.second[which][i] = square;
        step = mean / (sqrtf(square) + eps);
#elif RULE == 2
        float square = r.square_kept * t.first[which][i] + r.square_new * g * g, rms = sqrtf(square);
        t.first[which][i] = square;
        step = g / (PAPER ? fmaxf(rms, eps) : rms + eps);
#endif
        if (RULE != 1 && r.momentum != 0.0f) {
            float *moves = RULE == 0 ? t.first[which] : t.second[which];
            moves[i] = step = r.momentum * moves[i] + step;
        }
        t.g[which][i] = step;
    }
}

/* Steps are taken. */
extern "C" __global__ void __launch_bounds__(256) apply(const Tensors t, const Rule r) {
    const float by = (float)*r.by, keep = r.keep ? (float)*r.keep : 1.0f;
    EACH_NUMBER {
        float p = t.p[which][i];
        if (t.decays >> which & 1) p *= keep;
        t.p[which][i] = p - by * t.g[which][i];
    }
}
