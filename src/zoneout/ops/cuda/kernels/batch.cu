/* All steps in one launch with recurrent batch norm: each block owns a few units of the whole batch.
 *
 * So a block computes the moments of its units alone. The blocks are one cluster, and exchange values once a step.
 * A fragment is the weights of one k-step and one tile, as the registers of a warp. Macros:
 *
 *   BACKWARD       0: forward pass; 1: backward pass
 *   HIDDEN         units
 *   BLOCKS         blocks of the cluster
 *   UNIT_GROUPS    groups of 8 units in a block
 *   BANDS          bands of 16 rows
 *   RESIDENT       fragments in registers; the others are in shared memory
 *   ALIGNED_PAIRS  1: two adjacent values can be read at once
 *
 * A warp computes one band of one unit group: a tile of sums for each gate. A thread finds in them all gates of two
 * units of two rows. The same thread of another block has other units of the same rows. So a thread sends what the
 * same lane of the other block needs, and nothing is rearranged. In memory the gates are ordered [unit][gate], so
 * that those of a thread's two units are adjacent. In the forward pass each block sends its h to all blocks, which
 * multiply it with their columns of W_h. In the backward pass each block multiplies its gradients with all columns
 * of W_h, and sends each block the sums for its units: half as many bytes as the gradients, a quarter in TF32.
 *
 * A multiprocessor sends about 22 bytes per cycle to others, so values are exchanged in 16 bits if these suffice.
 * In TF32 too: h, and gradients times a power of two. Each warp chooses this for what it sends, and also sends its
 * inverse. (With batch norm the gradients of different rows have similar sizes.)
 *
 * A barrier counts the received bytes: a warp continues when all of its rows have arrived. Two buffers alternate.
 * They need no release: a block that has received all of step t knows that all blocks had read step t - 1 before
 * they sent it.
 */
#define WARPS (BANDS * UNIT_GROUPS)
#define THREADS (32 * WARPS)
#define VALUES_PER_UNIT (BACKWARD ? (GATES == 3 ? 4 : GATES) : 1) /* operands of one unit */
#define SCALED (BACKWARD && !TYPE && UNIT_GROUPS == 1) /* TF32 operands in half precision, times powers of two */
/* type of the operands of the product, as TYPE; h is between -1 and 1 */
#define OPERAND_TYPE (TYPE || (BACKWARD ? !SCALED : RELU) ? TYPE : 2)
#define VALUES_PER_WORD (OPERAND_TYPE ? 2 : 1) /* values of a 4-byte word */
/* words of two units of a row */
#define WORDS_PER_GROUP ((2 * VALUES_PER_UNIT + VALUES_PER_WORD - 1) / VALUES_PER_WORD)
/* backward pass: k-steps of a unit group; a k-step has two words */
#define K_STEPS_PER_GROUP ((WORDS_PER_GROUP + 1) / 2)
#define K_STEPS (BACKWARD ? UNIT_GROUPS * K_STEPS_PER_GROUP : (BLOCKS * UNIT_GROUPS * WORDS_PER_GROUP + 1) / 2)
#define TILES (BACKWARD ? BLOCKS : GATES)             /* of 8 columns of the right operand */
#define SHARED_FRAGMENTS (K_STEPS * TILES - RESIDENT) /* fragments in shared memory */
/* independent, so that a product need not wait for the one before */
#define ACCUMULATORS (GATES > 1 ? 1 : 4)
#define COLUMNS (GATES > 1 ? 8 : 2) /* values of h·Wh of two units, rounded up to a power of two */
#define VALUES (2 * GATES)          /* of two units of a row, in memory: [unit][gate] */
#define PREFETCH_STEPS 6            /* steps between a prefetch into L2 and its use */

#define EACH_ROW _Pragma("unroll") for (int r = 0; r < 2; r++)
#define EACH_UNIT _Pragma("unroll") for (int u = 0; u < 2; u++)
#define EACH_GATE _Pragma("unroll") for (int q = 0; q < GATES; q++)
#define EACH_INDEX(K) _Pragma("unroll") for (int i = 0; i < (K); i++)

#if OPERAND_TYPE
typedef uint2 Message; /* what a thread sends to a block */
#else
typedef uint4 Message;
#endif

struct Shared {
    Message received[2][BLOCKS * THREADS]; /* [buffer][from][thread] */
    /* operands of the product, for the block's other unit group */
    uint4 operands[BACKWARD && UNIT_GROUPS > 1 ? K_STEPS_PER_GROUP * THREADS : 1];
    /* of moments; alternating buffers, since other threads may still read */
    float2 sums[BACKWARD ? 3 : 2][THREADS];
    float inverse_scale[2][SCALED ? WARPS : 1][16]; /* [buffer][warp][from]: factors of received values */
    int lengths[BANDS * 16];
    /* [buffer]: barriers; in the forward pass one for all unit groups of a band */
    u64 arrivals[2][WARPS];
};

__device__ __forceinline__ Shared &shared_memory() {
    extern __shared__ __align__(16) char shared[];
    return *(Shared *)shared;
}

/* --- numbers ---------------------------------------------------------------------------------------- */

/* Volatile, so that it is computed at this place: during a wait. */
__device__ __forceinline__ float inverse(float var, double eps) {
    float out;
    asm volatile("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(var + (float)eps));
    return out;
}

/* Two adjacent units of a row; `second`: the second one exists. */
struct EarlyPair { /* see EarlyLoad */
    u32 bits[ALIGNED_PAIRS && TYPE ? 1 : 2];
};
__device__ __forceinline__ EarlyPair load_early_pair(const narrow *from, bool second) {
    EarlyPair out;
#if ALIGNED_PAIRS && TYPE
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(out.bits[0]) : "l"(from));
#elif ALIGNED_PAIRS
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(out.bits[0]), "=r"(out.bits[1]) : "l"(from));
#else
    out.bits[0] = load_early(from).bits;
    out.bits[1] = second ? load_early(from + 1).bits : 0;
#endif
    return out;
}
__device__ __forceinline__ float widen(const EarlyPair &v, int u) {
#if ALIGNED_PAIRS && TYPE
    return widen((narrow)(v.bits[0] >> 16 * u));
#else
    return widen(EarlyLoad{v.bits[u]});
#endif
}

/* Words of memory, as many at once as their alignment allows. */
template <int WORDS> __device__ __forceinline__ void load_words(u32 *to, const void *at) {
    const u32 *from = (const u32 *)at;
    if (WORDS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4)
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3]) : "l"(from + i));
    } else if (WORDS % 2 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 2)
            asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(to[i]), "=r"(to[i + 1]) : "l"(from + i));
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i++) asm volatile("ld.global.u32 %0, [%1];" : "=r"(to[i]) : "l"(from + i));
    }
}
template <int WORDS> __device__ __forceinline__ void store_words(void *at, const u32 *from) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        if (WORDS % 4 == 0) {
            if (i % 4 == 0) ((uint4 *)at)[i / 4] = make_uint4(from[i], from[i + 1], from[i + 2], from[i + 3]);
        } else if (WORDS % 2 == 0) {
            if (i % 2 == 0) ((uint2 *)at)[i / 2] = make_uint2(from[i], from[i + 1]);
        } else {
            ((u32 *)at)[i] = from[i];
        }
    }
}

struct EarlyGates { /* the gates of two adjacent units of a row; see EarlyLoad */
    u32 bits[ALIGNED_PAIRS && TYPE ? GATES : VALUES];
};
__device__ __forceinline__ EarlyGates load_early_gates(const narrow *from, bool second) {
    EarlyGates out;
    if (ALIGNED_PAIRS) {
        load_words<ALIGNED_PAIRS && TYPE ? GATES : VALUES>(out.bits, from);
    } else {
        EACH_INDEX(VALUES) out.bits[i] = i < GATES || second ? load_early(from + i).bits : 0;
    }
    return out;
}
__device__ __forceinline__ float widen(const EarlyGates &v, int u, int q) {
    const int n = u * GATES + q;
#if ALIGNED_PAIRS && TYPE
    return widen((narrow)(v.bits[n / 2] >> 16 * (n % 2)));
#else
    return widen(EarlyLoad{v.bits[n]});
#endif
}

struct EarlyFloats {
    u32 bits[VALUES];
    __device__ __forceinline__ float at(int u, int q) const { return __uint_as_float(bits[u * GATES + q]); }
};
__device__ __forceinline__ EarlyFloats load_early_floats(const float *from, bool second) {
    EarlyFloats out;
    if (ALIGNED_PAIRS) {
        load_words<VALUES>(out.bits, from);
    } else {
        EACH_INDEX(VALUES) out.bits[i] = i < GATES || second ? __float_as_uint(from[i]) : 0;
    }
    return out;
}

__device__ __forceinline__ void store_floats(float *to, const float (&v)[2][4], bool second) {
    if (ALIGNED_PAIRS) {
        u32 words[VALUES];
        EACH_INDEX(VALUES) words[i] = __float_as_uint(v[i / GATES][i % GATES]);
        store_words<VALUES>(to, words);
    } else {
        EACH_INDEX(VALUES) if (i < GATES || second) to[i] = v[i / GATES][i % GATES];
    }
}
__device__ __forceinline__ void store_gates(narrow *to, const float (&v)[2][4], bool second) {
#if !TYPE
    store_floats(to, v, second);
#else
    if (ALIGNED_PAIRS) {
        u32 words[GATES];
        EACH_INDEX(GATES) words[i] = pair(v[2 * i / GATES][2 * i % GATES], v[(2 * i + 1) / GATES][(2 * i + 1) % GATES]);
        store_words<GATES>(to, words);
    } else {
        EACH_INDEX(VALUES) if (i < GATES || second) to[i] = narrowed(v[i / GATES][i % GATES]);
    }
#endif
}

__device__ __forceinline__ float2 load_pair(const float *from, bool second) {
    return ALIGNED_PAIRS ? *(const float2 *)from : make_float2(from[0], second ? from[1] : 0.0f);
}
__device__ __forceinline__ float of_pair(const float2 &v, int u) { return u ? v.y : v.x; }
__device__ __forceinline__ void store_pair(float *to, float low, float high, bool second) {
    if (ALIGNED_PAIRS) {
        *(float2 *)to = make_float2(low, high);
    } else {
        to[0] = low;
        if (second) to[1] = high;
    }
}
__device__ __forceinline__ void store_narrow_pair(narrow *to, float low, float high, bool second) {
#if !TYPE
    store_pair(to, low, high, second);
#else
    if (ALIGNED_PAIRS) {
        *(u32 *)to = pair(low, high);
    } else {
        to[0] = narrowed(low);
        if (second) to[1] = narrowed(high);
    }
#endif
}

/* --- the position of a thread ------------------------------------------------------------------------- */

struct Thread { /* two units of two rows */
    int warp, lane, unit_group, band, unit;
    int senders;           /* lanes of the warp that have a row: others send nothing, and what they read is not used */
    bool in[2];            /* the units exist */
    int row[2], length[2]; /* a row that does not exist has length 0 */
    u32 example[2];
};

#define ALIVE(t) (HAS_LENGTHS ? (t) < m.length[r] : m.length[r] > 0)
#define ACTIVE(t) (m.in[0] && ALIVE(t))

__device__ __forceinline__ Thread thread_of(const Loop &l) {
    Thread m;
    m.warp = threadIdx.x / 32, m.lane = threadIdx.x % 32, m.unit_group = m.warp / BANDS, m.band = m.warp % BANDS;
    m.unit = (blockIdx.x * UNIT_GROUPS + m.unit_group) * 8 + m.lane % 4 * 2;
    m.in[0] = m.unit < HIDDEN, m.in[1] = m.unit + 1 < HIDDEN;
    m.senders = min(8, (int)l.batch - m.band * 16) * 4;
    EACH_ROW {
        m.row[r] = m.band * 16 + r * 8 + m.lane / 4;
        bool exists = m.row[r] < l.batch;
        m.length[r] = exists ? (int)length_of(l, m.row[r]) : 0;
        m.example[r] = exists ? (u32)l.examples[m.row[r]] : 0;
        if (m.unit_group == 0 && m.lane % 4 == 0) shared_memory().lengths[m.row[r]] = m.length[r];
    }
    return m;
}

/* --- the cluster ------------------------------------------------------------------------------------ */

__device__ __forceinline__ u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }
__device__ __forceinline__ u64 *barrier_of(int buffer, const Thread &m) {
    return &shared_memory().arrivals[buffer][BACKWARD ? m.warp : m.band];
}

/* Announce the bytes that will arrive in a buffer; they may have arrived already. */
__device__ __forceinline__ void expect_bytes(int buffer, const Thread &m) {
    const u32 bytes = BLOCKS * ((BACKWARD ? 1 : UNIT_GROUPS) * m.senders * sizeof(Message) + SCALED * 4);
    if (m.lane == 0 && (BACKWARD || m.unit_group == 0))
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
            ::"r"(shared_address(barrier_of(buffer, m))), "r"(bytes)
                     : "memory");
}

/* Wait until all bytes have arrived. `phase`: 1 if the buffer was used an odd number of times before. */
__device__ __forceinline__ void await_buffer(int buffer, u32 phase, const Thread &m) {
    const u32 at = shared_address(barrier_of(buffer, m));
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at), "r"(phase) : "memory");
    } while (!done);
}

/* Start the cluster: all blocks initialise their barriers, for the first use of both buffers. */
__device__ __forceinline__ void begin_cluster(const Thread &m) {
    if (threadIdx.x < 2 * WARPS)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
            ::"r"(shared_address((u64 *)shared_memory().arrivals + threadIdx.x)), "r"(1) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    expect_bytes(0, m), expect_bytes(1, m);
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The address of the same place in another block. */
__device__ __forceinline__ u32 remote_address(const void *local, int block) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(local)), "r"(block));
    return remote;
}

/* Send to another block, where the same warp waits for it. */
__device__ __forceinline__ void send(int buffer, const Message &v, int to, const Thread &m) {
    if (m.lane >= m.senders) return;
    const u32 remote = remote_address(shared_memory().received[buffer] + blockIdx.x * THREADS + threadIdx.x, to);
    const u32 counter = remote_address(barrier_of(buffer, m), to);
#if !OPERAND_TYPE
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(remote), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(counter) : "memory");
#else
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];"
                 ::"r"(remote), "r"(v.x), "r"(v.y), "r"(counter) : "memory");
#endif
}

/* Send a factor to all blocks, one lane for each. */
__device__ __forceinline__ void send_inverse_scale(int buffer, float v, const Thread &m) {
    if (m.lane >= BLOCKS) return;
    const u32 remote = remote_address(&shared_memory().inverse_scale[buffer][SCALED ? m.warp : 0][blockIdx.x], m.lane);
    const u32 counter = remote_address(barrier_of(buffer, m), m.lane);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 ::"r"(remote), "r"(__float_as_uint(v)), "r"(counter) : "memory");
}

/* The i-th block to send to: at any time each block is the target of another one. */
__device__ __forceinline__ int target_block(int i) {
    int to = blockIdx.x + i;
    return to < BLOCKS ? to : to - BLOCKS;
}

/* --- the product ------------------------------------------------------------------------------------ */

/* Forward pass: clamp floats that are exchanged in half precision; NaN stays NaN. */
__device__ __forceinline__ float clamp_to_half(float v) {
    return OPERAND_TYPE == TYPE || BACKWARD ? v : v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
}

/* Word `word` of the depth and a column of a tile, for a thread of column pair `from` of the left operand. */
__device__ __forceinline__ u32 weights_at(const Loop &l, float by, int unit_group, int tile, int column, int word,
                                          int from) {
    auto number = [&](int n) { /* value n of the thread */
#if BACKWARD
        int p = word / (2 * K_STEPS_PER_GROUP) /* unit group */, gate = n % VALUES_PER_UNIT;
        int source = (blockIdx.x * UNIT_GROUPS + p) * 8 + from * 2 + n / VALUES_PER_UNIT;
        int unit = (target_block(tile) * UNIT_GROUPS + unit_group) * 8 + column;
        bool in = n < 2 * VALUES_PER_UNIT && gate < GATES;
#else
        int gate = tile, source = n / 2 * 8 + from * 2 + n % 2,
            unit = (blockIdx.x * UNIT_GROUPS + unit_group) * 8 + column;
        bool in = true;
#endif
        if (!in || source >= HIDDEN || unit >= HIDDEN) return 0.0f;
        int row = (BACKWARD ? source : unit) * GATES + gate, at = BACKWARD ? unit : source;
        return widen(((const narrow *)l.w_hh)[row * HIDDEN + at]) * by;
    };
    const int n = (BACKWARD ? word % (2 * K_STEPS_PER_GROUP) : word) * VALUES_PER_WORD;

#if OPERAND_TYPE
    return pair_as<OPERAND_TYPE>(clamp_to_half(number(n)), clamp_to_half(number(n + 1)));
#else
    return tf32_bits(number(n));
#endif
}

struct Weights {
    u32 in_registers[RESIDENT > 0 ? RESIDENT : 1][2];
    int scale;              /* SCALED: exponent of the power of two that scales the weights */
    const uint2 *in_shared; /* [SHARED_FRAGMENTS][32 lanes] of the unit group */
};

__device__ __forceinline__ void load_weights(const Loop &l, Weights &w, const Thread &m) {
    uint2 *to = (uint2 *)(&shared_memory() + 1) + m.unit_group * SHARED_FRAGMENTS * 32 + m.lane;
    w.in_shared = to;
    float by = 1.0f;
#if SCALED
    const int first = blockIdx.x * 8, count = min(8, HIDDEN - first) * GATES * HIDDEN;
    u32 top = 0;
    for (int i = m.lane; i < count; i += 32)
        top = max(top, magnitude_bits(((const float *)l.w_hh)[first * GATES * HIDDEN + i]));
    /* the largest weight becomes a value between 1 and 2 */
    w.scale = max(-100, min(scale_exponent(warp_max(top)) - 14, 20)), by = power_of_two(w.scale);
#endif
#pragma unroll
    for (int s = 0; s < K_STEPS; s++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int i = s * TILES + tile;
            u32 low = weights_at(l, by, m.unit_group, tile, m.lane / 4, s * 2, m.lane % 4);
            u32 high = weights_at(l, by, m.unit_group, tile, m.lane / 4, s * 2 + 1, m.lane % 4);
            if (i < RESIDENT) {
                w.in_registers[i < RESIDENT ? i : 0][0] = low, w.in_registers[i < RESIDENT ? i : 0][1] = high;
            } else if (m.band == 0) {
                to[(i - RESIDENT) * 32] = make_uint2(low, high);
            }
        }
}

/* Add one k-step of one tile; weights in shared memory are read again each time. */
__device__ __forceinline__ void add_step(float *sum, const u32 *a, const Weights &w, int s, int tile) {
    const int i = s * TILES + tile;
    if (i < RESIDENT) {
        const u32 *one = w.in_registers[i < RESIDENT ? i : 0];
        multiply_as<OPERAND_TYPE>(sum, a, one[0], one[1]);
    } else {
        uint2 one = w.in_shared[(i - RESIDENT) * 32];
        multiply_as<OPERAND_TYPE>(sum, a, one.x, one.y);
    }
}

/* --- memory ----------------------------------------------------------------------------------------- */

/* Prefetch into L2 what step t reads of an array: each thread of the cluster one cache line. For reversed rows with
 * lengths some of it is prefetched too early. */
__device__ __forceinline__ void prefetch_l2(const Loop &l, const void *from, int width, int t) {
    if (t < 0 || t >= l.steps) return;
    i64 size = l.batch * width;
    const char *begin = (const char *)from + position(l, t, l.steps) * size;
    for (int at = (blockIdx.x * THREADS + threadIdx.x) * 128; at < size; at += BLOCKS * THREADS * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(begin + at));
}

/* --- noise ------------------------------------------------------------------------------------------ */

struct Seeds {
    u64 cell, hidden, update;
    bool same; /* one word serves both states */
};

__device__ __forceinline__ Seeds seeds_of(const Loop &l) {
    Seeds s;
    s.cell = l.cell.mode == DRAWN ? (u64)*l.cell.seed : 0;
    s.hidden = l.hidden_state.mode == DRAWN ? (u64)*l.hidden_state.seed : 0;
    s.update = l.update.mode == DRAWN ? (u64)*l.update.seed : 0;
    Noise one = {0, 0.0f, s.cell}, two = {0, 0.0f, s.hidden};
    s.same = l.cell.mode == DRAWN && (KNOWN_MODES || same_words(l.cell, one, l.hidden_state, two));
    return s;
}

/* Draw the words of both units of both rows. One draw serves four units, so of the two lanes with these units each
 * draws for one of the rows. All lanes of a warp must call this. */
__device__ __forceinline__ void draw_words(u32 (&word)[2][2], const Loop &l, const Thread &m, const Stream &s,
                                           u64 seed, int t) {
    const bool odd = m.lane % 2;
    u32 w[4], step = mask_step(l, t, odd ? m.length[1] : m.length[0]), example = odd ? m.example[1] : m.example[0];
    philox(w, seed, s.sees_unit ? m.unit / 4 : 0, s.sees_example ? example : 0, s.sees_step ? step : 0, s.plane);
    if (!s.sees_unit) w[1] = w[2] = w[3] = w[0];
    u32 low = __shfl_xor_sync(~0u, odd ? w[0] : w[2], 1), high = __shfl_xor_sync(~0u, odd ? w[1] : w[3], 1);
    word[0][0] = odd ? low : w[0], word[0][1] = odd ? high : w[1];
    word[1][0] = odd ? w[2] : low, word[1][1] = odd ? w[3] : high;
}

/* Bits [row][unit]: 1 if the old value is kept. */
__device__ __forceinline__ u32 compare_words(const u32 (&word)[2][2], const Stream &s, u32 limit0, u32 limit1) {
    u32 out = 0;
    EACH_ROW EACH_UNIT {
        u32 v = word[r][u] >> (s.high ? 16 : 0) & 0xFFFF;
        out |= (u32)(v < (u ? limit1 : limit0)) << (r * 2 + u);
    }
    return out;
}

/* Draw the masks of a step: bits [stream][row][unit]. */
__device__ __forceinline__ u32 draw_masks(const Loop &l, const Thread &m, const Seeds &seeds, const Noises (&n)[2],
                                          int t) {
    u32 word[2][2] = {}, masks = 0;
    if (l.cell.mode == DRAWN) {
        draw_words(word, l, m, l.cell, seeds.cell, t);
        masks = compare_words(word, l.cell, n[0].cell.threshold, n[1].cell.threshold);
    }
    if (l.hidden_state.mode == DRAWN) {
        if (!seeds.same) draw_words(word, l, m, l.hidden_state, seeds.hidden, t);
        masks |= compare_words(word, l.hidden_state, n[0].hidden.threshold, n[1].hidden.threshold) << 4;
    }
    if (l.update.mode == DRAWN) {
        draw_words(word, l, m, l.update, seeds.update, t);
        masks |= compare_words(word, l.update, n[0].update.threshold, n[1].update.threshold) << 8;
    }
    return masks;
}

__device__ __forceinline__ Keep keep_at(const Loop &l, u32 masks, const Noises &n, int r, int u) {
    const int at = r * 2 + u;
    return {l.cell.mode == EXPECTED ? n.cell.rate : masks >> at & 1 ? 1.0f : 0.0f,
            l.hidden_state.mode == EXPECTED ? n.hidden.rate : masks >> (at + 4) & 1 ? 1.0f : 0.0f,
            l.update.mode == EXPECTED ? n.update.rate : masks >> (at + 8) & 1 ? 1.0f : 0.0f};
}

/* --- norms ------------------------------------------------------------------------------------------ */

/* The number of rows of a band that have not ended. All lanes of a warp must call this. */
__device__ __forceinline__ int rows_alive(const Loop &l, int band, int t, int lane) {
    int left = (int)l.batch - band * 16;
    if (!l.lengths) return left < 16 ? left : 16;
    return __popc(__ballot_sync(~0u, lane < 16 && shared_memory().lengths[band * 16 + lane % 16] > t));
}

struct Counts {
    /* 1 / rows of the band, 1 / all rows, and the share of each band in all rows */
    float of_band, of_all, weight[BANDS];
};

__device__ __forceinline__ Counts counts_at(const Loop &l, const Thread &m, int t) {
    Counts c;
    int total = 0, rows[BANDS], in_band = rows_alive(l, m.band, t, m.lane);
    EACH_INDEX(BANDS) rows[i] = rows_alive(l, i, t, m.lane), total += rows[i];
    c.of_band = in_band ? __fdividef(1.0f, in_band) : 0.0f, c.of_all = total ? __fdividef(1.0f, total) : 0.0f;
    EACH_INDEX(BANDS) c.weight[i] = rows[i] * c.of_all;
    return c;
}

/* The index of the value that a lane has after `sum_over_rows`; and the value of an index, from a lane with the
 * same columns. */
template <int COUNT>
__device__ __forceinline__ int own_index(int lane) {
    return lane / 4 * COUNT / 8;
}
/* True for one of the lanes that have the same index and columns: the one that writes the value. */
template <int COUNT>
__device__ __forceinline__ bool writes_index(int lane) {
    return lane / 4 % (8 / COUNT) == 0;
}

template <int COUNT>
__device__ __forceinline__ float value_of_index(float v, int number, int lane) {
    return __shfl_sync(~0u, v, number * (32 / COUNT) + lane % 4);
}

/* `a` if the mask is all ones, `b` if it is zero: without a branch. */
__device__ __forceinline__ float select(u32 mask, float a, float b) {
    return __uint_as_float((__float_as_uint(a) & mask) | (__float_as_uint(b) & ~mask));
}

/* All ones if a bit of the lane number is set. Hidden from the compiler, which would otherwise branch. */
__device__ __forceinline__ u32 lane_mask(int lane, int far) {
    u32 mask = lane & far ? ~0u : 0;
    asm("" : "+r"(mask));
    return mask;
}

/* Sum over the eight lanes with the same columns. Each lane is left with one of the COUNT sums. */
template <int COUNT>
__device__ __forceinline__ float sum_over_rows(float (&v)[COUNT], int lane) {
#pragma unroll
    for (int far = 16; far >= 4; far /= 2) {
        const int left = COUNT * far / 32;
        if (left) {
            const u32 mask = lane_mask(lane, far);
            EACH_INDEX(left) {
                float give = select(mask, v[i], v[i + left]), keep = select(mask, v[i + left], v[i]);
                v[i] = keep + __shfl_xor_sync(~0u, give, far);
            }
        } else {
            v[0] += __shfl_xor_sync(~0u, v[0], far);
        }
    }
    return v[0];
}

/* The value of a lane's own index. */
template <int COUNT>
__device__ __forceinline__ float own_value(float (&v)[COUNT], int lane) {
#pragma unroll
    for (int far = 16; far >= 4; far /= 2) {
        const int left = COUNT * far / 32;
        EACH_INDEX(left) v[i] = select(lane_mask(lane, far), v[i + left], v[i]);
    }
    return v[0];
}

/* Mean and 1 / standard deviation of COUNT columns. A band sums differences to the first of its rows, and the bands
 * are combined by differences to the first band. So if all rows are equal, the mean is exactly that row. Returns
 * mean and variance of the lane's own index. */
template <int COUNT>
__device__ __forceinline__ float2 moments(float (&mean)[COUNT], float (&rstd)[COUNT], const float (&v)[2][COUNT],
                                          const bool (&alive)[2], const Counts &counts, float2 *sums, double eps,
                                          const Thread &m) {
    float first[COUNT], one[COUNT], two[COUNT];
    u32 low = 1, high = 0; /* lanes with a row that has not ended; without lengths the first has one */
    if (HAS_LENGTHS) low = __ballot_sync(~0u, alive[0]), high = __ballot_sync(~0u, alive[1]);
    const int from = (low ? __ffs(low) : high ? __ffs(high) : 1) - 1 + m.lane % 4; /* all lanes of a row end together */
    EACH_INDEX(COUNT) first[i] = __shfl_sync(~0u, low ? v[0][i] : v[1][i], from);
    EACH_INDEX(COUNT) {
        float d0 = alive[0] ? v[0][i] - first[i] : 0.0f, d1 = alive[1] ? v[1][i] - first[i] : 0.0f;
        one[i] = d0 + d1, two[i] = d0 * d0 + d1 * d1;
    }
    float sum = sum_over_rows<COUNT>(one, m.lane), squares = sum_over_rows<COUNT>(two, m.lane),
        off = sum * counts.of_band;
    float2 moment = make_float2(own_value<COUNT>(first, m.lane) + off, fmaxf(squares - sum * off, 0.0f));
    sums[threadIdx.x] = counts.of_band > 0.0f ? moment : make_float2(0.0f, 0.0f);
    __syncthreads();
    float2 band[BANDS];
    EACH_INDEX(BANDS) band[i] = sums[(m.unit_group * BANDS + i) * 32 + m.lane];
    float near = band[0].x; /* the mean of the first band with rows */
    if (HAS_LENGTHS) EACH_INDEX(BANDS) near = counts.weight[BANDS - 1 - i] > 0.0f ? band[BANDS - 1 - i].x : near;
    moment = make_float2(0.0f, 0.0f);
    EACH_INDEX(BANDS) moment.x += counts.weight[i] * (band[i].x - near);
    moment.x += near;
    EACH_INDEX(BANDS) {
        float d = band[i].x - moment.x;
        moment.y += band[i].y * counts.of_all + counts.weight[i] * d * d;
    }
    float scale = inverse(moment.y, eps);
    EACH_INDEX(COUNT) {
        mean[i] = value_of_index<COUNT>(moment.x, i, m.lane);
        rstd[i] = value_of_index<COUNT>(scale, i, m.lane);
    }
    return moment;
}

/* The backward pass of a norm: from the gradient of the normalised values to that of the norm's input. */
template <int COUNT>
__device__ __forceinline__ void moments_back(float (&d)[2][COUNT], const float (&hat)[2][COUNT],
                                             const float (&rstd)[COUNT], const bool (&alive)[2], float share,
                                             float2 *sums, const Thread &m) {
    float one[COUNT], two[COUNT];
    EACH_INDEX(COUNT) {
        float d0 = alive[0] ? d[0][i] : 0.0f, d1 = alive[1] ? d[1][i] : 0.0f;
        one[i] = d0 + d1, two[i] = d0 * hat[0][i] + d1 * hat[1][i];
    }
    float sum = sum_over_rows<COUNT>(one, m.lane), with_hat = sum_over_rows<COUNT>(two, m.lane);
    sums[threadIdx.x] = make_float2(sum, with_hat);
    __syncthreads();
    sum = with_hat = 0.0f;
    EACH_INDEX(BANDS) {
        float2 band = sums[(m.unit_group * BANDS + i) * 32 + m.lane];
        sum += band.x, with_hat += band.y;
    }
    sum *= share, with_hat *= share;
    EACH_INDEX(COUNT) {
        float mean = value_of_index<COUNT>(sum, i, m.lane), slope = value_of_index<COUNT>(with_hat, i, m.lane);
        EACH_ROW d[r][i] = rstd[i] * (d[r][i] - mean - hat[r][i] * slope);
    }
}

/* --- forward pass --------------------------------------------------------------------------------------- */
#if !BACKWARD
/* Multiply h with the block's columns: sum[row][unit] of each gate. */
__device__ __forceinline__ void product(float (&sum)[ACCUMULATORS][GATES][4], const Weights &w, const Message *sent,
                                        const Thread &m) {
    const Message *from = sent + m.band * 32 + m.lane;
#pragma unroll
    for (int s = 0; s < K_STEPS; s++) {

#if OPERAND_TYPE
        uint2 low = from[s * 2 * BANDS * 32], high = make_uint2(0, 0);
        if (s * 2 + 1 < BLOCKS * UNIT_GROUPS) high = from[(s * 2 + 1) * BANDS * 32];
        u32 a[4] = {low.x, low.y, high.x, high.y};
#else
        uint4 v = from[s * BANDS * 32];
        u32 a[4] = {v.x, v.y, v.z, v.w};
#endif
        EACH_GATE add_step(sum[s % ACCUMULATORS][q], a, w, s, q);
    }
}

/* Send both rows and units to all blocks, as operands. */
__device__ __forceinline__ void send_h(int buffer, float (&v)[2][2], const Thread &m) {

#if OPERAND_TYPE
    EACH_ROW EACH_UNIT v[r][u] = clamp_to_half(v[r][u]);
    Message message = make_uint2(pair_as<OPERAND_TYPE>(v[0][0], v[0][1]), pair_as<OPERAND_TYPE>(v[1][0], v[1][1]));
#else
    Message message = make_uint4(tf32_bits(v[0][0]), tf32_bits(v[1][0]), tf32_bits(v[0][1]), tf32_bits(v[1][1]));
#endif
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) send(buffer, message, target_block(i), m);
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    forward(const Loop given, const Norm n) {
    Shared &shared = shared_memory();
    Loop l = given;
    simplify(l);
    const Thread m = thread_of(l);
    narrow *gates = (narrow *)l.gates;
    Weights w;
    load_weights(l, w, m);
    const Seeds seeds = seeds_of(l);
    Noises noises[2] = {};
    /* x's part already contains its bias */
    float bias[2][GATES] = {}, scale_h[2][GATES] = {}, scale_c[2] = {}, shift_c[2] = {};
    EACH_UNIT if (m.in[u]) {
        noises[u] = noises_of(l, m.unit + u);
        EACH_GATE {
            if (l.b_h) bias[u][q] = widen(((const narrow *)l.b_h)[(m.unit + u) * GATES + q]);
            scale_h[u][q] = n.scale_h[(m.unit + u) * GATES + q];
        }
        if (LSTM) scale_c[u] = n.scale_c[m.unit + u], shift_c[u] = n.shift_c[m.unit + u];
    }

    float h[2][2] = {}, state[2][2] = {}, o[2][2] = {}, h_scale[2][2] = {}; /* h_scale: the variational mask */
    float a[2][2][4] = {}, hat[2][2][4] = {};
    EarlyGates x_part[2] = {}; /* x's part */
    bool cut[2] = {}, cut_next[2] = {};
    int at[2]; /* row of this step; at · G · H stays below 2³¹ */
    const int step_stride = l.reverse ? -(int)l.batch : (int)l.batch;
    u32 masks = 0;
    Counts counts = {};
    /* Load the inputs of step t, except h. */
    auto prepare = [&](int t) {
        EACH_ROW if (ACTIVE(t)) {
            x_part[r] = load_early_gates(gates + (at[r] * HIDDEN + m.unit) * GATES, m.in[1]);
            cut_next[r] = t + 1 < m.length[r] && cut_at(l, t + 1, m.row[r], m.length[r]);
        }
        prefetch_l2(l, gates, GATES * HIDDEN * sizeof(narrow), t + PREFETCH_STEPS);
        masks = draw_masks(l, m, seeds, noises, t);
        if (l.lengths) counts = counts_at(l, m, t);
    };
    EACH_ROW {
        at[r] = (int)row_index(l, 0, m.row[r], m.length[r]);
        if (ACTIVE(0)) cut[r] = cut_at(l, 0, m.row[r], m.length[r]);
        EACH_UNIT if (ALIVE(0) && m.in[u]) {
            i64 start = (i64)m.row[r] * HIDDEN + m.unit + u;
            h[r][u] = start_h(l, cut[r], start);
            if (LSTM) state[r][u] = start_c(l, cut[r], start);
            h_scale[r][u] = l.scale_h ? widen(((const narrow *)l.scale_h)[start]) : 1.0f;
        }
    }
    begin_cluster(m);
    counts = counts_at(l, m, 0);
    {
        float out[2][2];
        EACH_ROW EACH_UNIT out[r][u] = l.scale_h ? h[r][u] * h_scale[r][u] : h[r][u];
        send_h(0, out, m);
    }
    prepare(0);

    for (int t = 0; t < l.steps; t++) {
        await_buffer(t & 1, t >> 1 & 1, m);
        expect_bytes(t & 1, m);
        float sum[ACCUMULATORS][GATES][4] = {};
        product(sum, w, shared.received[t & 1], m);
        bool alive[2];
        float v[2][COLUMNS] = {}, mean[COLUMNS], rstd[COLUMNS];
        EACH_ROW {
            alive[r] = ALIVE(t);
            EACH_GATE EACH_UNIT {
                float &to = v[r][q * 2 + u] = sum[0][q][r * 2 + u];
#pragma unroll
                for (int i = 1; i < ACCUMULATORS; i++) to += sum[i][q][r * 2 + u];
            }
        }
        float2 moments_h = moments<COLUMNS>(mean, rstd, v, alive, counts, shared.sums[LSTM ? 0 : t & 1], n.eps, m);
        float2 moments_c = make_float2(0.0f, 0.0f);
        EACH_ROW EACH_GATE EACH_UNIT {
            const int i = q * 2 + u;
            hat[r][u][q] = (v[r][i] - mean[i]) * rstd[i];
            v[r][i] = hat[r][u][q] * scale_h[u][q] + bias[u][q];
        }
        Keep keep[2][2];
        float shown[2][2] = {};
        EACH_ROW EACH_UNIT {
            keep[r][u] = keep_at(l, masks, noises[u], r, u);
            if (cut[r] && m.in[u]) {
                i64 start = (i64)m.row[r] * HIDDEN + m.unit + u;
                h[r][u] = start_h(l, true, start);
                if (LSTM) state[r][u] = start_c(l, true, start);
            }
#if LSTM
            EACH_GATE {
                float sums = widen(x_part[r], u, q) + v[r][q * 2 + u];
                a[r][u][q] = q == 2 ? tanh_approx(sums) : sigmoid_approx(sums);
            }
            shown[r][u] = lstm_candidate(l, a[r][u][0], a[r][u][1], a[r][u][2], state[r][u], keep[r][u]);
            state[r][u] = alive[r] ? carried_c(l, shown[r][u], state[r][u], keep[r][u]) : state[r][u];
#endif
        }
#if LSTM
        {
            float mean_c[2], rstd_c[2];
            moments_c = moments<2>(mean_c, rstd_c, shown, alive, counts, shared.sums[1], n.eps, m);
            EACH_ROW EACH_UNIT shown[r][u] = (shown[r][u] - mean_c[u]) * rstd_c[u] * scale_c[u] + shift_c[u];
        }
#endif
        float out[2][2];
        EACH_ROW EACH_UNIT {
#if LSTM
            float gate = a[r][u][3];
            if (l.update.mode && l.update.hold && t && !cut[r]) gate = mix(gate, o[r][u], keep[r][u].update);
            o[r][u] = a[r][u][3];
            float candidate = gate * tanh_approx(shown[r][u]);
#elif GRU
            float reset = sigmoid_approx(widen(x_part[r], u, 0) + v[r][u]),
                z = sigmoid_approx(widen(x_part[r], u, 1) + v[r][2 + u]);
            float new_h = tanh_approx(fmaf(reset, v[r][4 + u], widen(x_part[r], u, 2))), update = (1 - z) * new_h;
            a[r][u][0] = reset, a[r][u][1] = z, a[r][u][2] = new_h;
            if (l.update.mode) update = drop_out(update, keep[r][u].update);
            float candidate = fmaf(z, h[r][u], update);
#else
            float sums = widen(x_part[r], u, 0) + v[r][u], candidate = RELU ? fmaxf(sums, 0.0f) : tanh_approx(sums);
            a[r][u][0] = candidate;
#endif
            h[r][u] = alive[r] ? carried_h(l, candidate, h[r][u], keep[r][u]) : h[r][u];
            out[r][u] = h[r][u];
            if (cut_next[r] && m.in[u]) out[r][u] = start_h(l, true, (i64)m.row[r] * HIDDEN + m.unit + u);
            if (l.scale_h) out[r][u] *= h_scale[r][u];
        }
        if (t + 1 < l.steps) send_h((t + 1) & 1, out, m);
        /* Before the others' values arrive: inputs of the next step, and results. */
        const int this_row[2] = {at[0], at[1]};
        EACH_ROW at[r] += step_stride, cut[r] = cut_next[r];
        if (t + 1 < l.steps) prepare(t + 1);
        EACH_ROW {
            if (ACTIVE(t)) {
                int unit = this_row[r] * HIDDEN + m.unit;
                store_narrow_pair((narrow *)l.y + unit, h[r][0], h[r][1], m.in[1]);
                if (LSTM) store_pair(l.c + unit, state[r][0], state[r][1], m.in[1]);
                store_gates(gates + unit * GATES, a[r], m.in[1]);
                store_floats(l.gh + unit * GATES, hat[r], m.in[1]);
            }
        }
        { /* all bands have the same moments: each writes some of them */
            int number = own_index<COLUMNS>(m.lane), unit = m.unit + number % 2,
                to = (t * HIDDEN + unit) * GATES + number / 2;
            if (number / 2 < GATES && unit < HIDDEN && writes_index<COLUMNS>(m.lane)) {
                if (m.band == 0) n.mean_h[to] = moments_h.x;
                if (m.band == 1 % BANDS) n.var_h[to] = moments_h.y;
            }
            number = own_index<2>(m.lane), unit = m.unit + number, to = t * HIDDEN + unit;
            if (LSTM && unit < HIDDEN && writes_index<2>(m.lane)) {
                if (m.band == 2 % BANDS) n.mean_c[to] = moments_c.x;
                if (m.band == 3 % BANDS) n.var_c[to] = moments_c.y;
            }
        }
    }
}
#endif

/* --- backward pass -------------------------------------------------------------------------------------- */
#if BACKWARD
struct Fetched { /* inputs of a step, from memory */
    EarlyGates gates;
    EarlyFloats hat;
    EarlyPair dy, old_h;
    EarlyLoad held[2];
    float2 old_c, dcells;
    bool first, cut;
};
struct Moments {
    EarlyFloats var_h;
    float2 mean_c, var_c;
};

/* The received sum for a unit of a row. */
__device__ __forceinline__ float received_sum(const Message &v, int r, int u) {
#if !OPERAND_TYPE
    const u32 one[4] = {v.x, v.y, v.z, v.w};
    return __uint_as_float(one[r * 2 + u]);
#elif SCALED
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"((u16)((r ? v.y : v.x) >> 16 * u)));
    return out;
#else
    return __uint_as_float(u ? (r ? v.y : v.x) & 0xFFFF0000 : (r ? v.y : v.x) << 16);
#endif
}

/* Subtract the mean over all rows that have not ended from two columns. */
__device__ __forceinline__ void centre(float (&v)[2][2], const bool (&alive)[2], float share, float2 *sums,
                                       const Thread &m) {
    float both[2];
    EACH_UNIT both[u] = (alive[0] ? v[0][u] : 0.0f) + (alive[1] ? v[1][u] : 0.0f);
    sums[threadIdx.x].x = sum_over_rows<2>(both, m.lane);
    __syncthreads();
    float mean = 0.0f;
    EACH_INDEX(BANDS) mean += sums[(m.unit_group * BANDS + i) * 32 + m.lane].x;
    EACH_UNIT {
        float column_mean = value_of_index<2>(mean * share, u, m.lane);
        EACH_ROW v[r][u] -= column_mean;
    }
}

/* Multiply the gradients of a thread's units and rows with all of W_h, and send the sums to the blocks that own the
 * columns. */
__device__ __forceinline__ void send_product(Shared &shared, int buffer, const float (&d)[2][2][4], const Weights &w,
                                             const Thread &m) {
    u32 a[K_STEPS][4];
    float by = 1.0f;
#if SCALED
    u32 top = 0;
    EACH_ROW EACH_UNIT EACH_GATE top = max(top, magnitude_bits(d[r][u][q]));
    top = warp_max(top);
    /* at most 2^9: the sum of 32 products with weights below 2 is below 2^16 */
    const int scale = min(scale_exponent(top) - 6, 100), all = scale + w.scale;
    by = power_of_two(scale);
    send_inverse_scale(buffer, top >= 0x7F800000 || all < -126 ? __uint_as_float(0x7FC00000) : power_of_two(-all), m);
#endif
#pragma unroll
    for (int k = 0; k < K_STEPS_PER_GROUP; k++) {
        EACH_INDEX(4) {
            const int r = i % 2, n = (k * 2 + i / 2) * VALUES_PER_WORD; /* index of the first value of the word */
            float low = n < 2 * VALUES_PER_UNIT ? d[r][n / VALUES_PER_UNIT % 2][n % VALUES_PER_UNIT] * by : 0.0f;
            float high = n + 1 < 2 * VALUES_PER_UNIT
                ? d[r][(n + 1) / VALUES_PER_UNIT % 2][(n + 1) % VALUES_PER_UNIT] * by : 0.0f;

#if OPERAND_TYPE
            a[k][i] = pair_as<OPERAND_TYPE>(low, high);
#else
            a[k][i] = tf32_bits(low);
#endif
        }
        if (UNIT_GROUPS > 1)
            shared.operands[k * THREADS + threadIdx.x] = make_uint4(a[k][0], a[k][1], a[k][2], a[k][3]);
    }
    if (UNIT_GROUPS > 1) {
        __syncthreads();
#pragma unroll
        for (int s = 0; s < K_STEPS; s++) {
            const int warp = s / K_STEPS_PER_GROUP * BANDS + m.band;
            uint4 v = shared.operands[s % K_STEPS_PER_GROUP * THREADS + warp * 32 + m.lane];
            a[s][0] = v.x, a[s][1] = v.y, a[s][2] = v.z, a[s][3] = v.w;
        }
    }
#pragma unroll
    for (int tile = 0; tile < BLOCKS; tile++) {
        float sum[4] = {};
#pragma unroll
        for (int s = 0; s < K_STEPS; s++) add_step(sum, a[s], w, s, tile);
#if !OPERAND_TYPE
        Message message = make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                               __float_as_uint(sum[3]));
#else
        constexpr int kind = SCALED ? 2 : 1; /* without a scale the sums can have any size: bfloat16 has the range */
        Message message = make_uint2(pair_as<kind>(sum[0], sum[1]), pair_as<kind>(sum[2], sum[3]));
#endif
        send(buffer, message, target_block(tile), m);
    }
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    backward(const Loop given, const Norm n) {
    Shared &shared = shared_memory();
    Loop l = given;
    simplify(l);
    const Thread m = thread_of(l);
    const narrow *gates = (const narrow *)l.gates;
    const bool holds_gate = l.update.mode && l.update.hold;
    Weights w;
    load_weights(l, w, m);
    const Seeds seeds = seeds_of(l);
    Noises noises[2] = {};
    float scale_h[2][GATES] = {}, scale_c[2] = {}, shift_c[2] = {}, bias[2] = {}; /* bias: of the gate n of a GRU */
    EACH_UNIT if (m.in[u]) {
        noises[u] = noises_of(l, m.unit + u);
        EACH_GATE scale_h[u][q] = n.scale_h[(m.unit + u) * GATES + q];
        if (LSTM) scale_c[u] = n.scale_c[m.unit + u], shift_c[u] = n.shift_c[m.unit + u];
        if (GRU && l.b_h) bias[u] = widen(((const narrow *)l.b_h)[(m.unit + u) * GATES + 2]);
    }

    float dh[2][2] = {}, dc[2][2] = {}, dreset_h[2][2] = {}, dreset_c[2][2] = {}, owed[2][2] = {}, h_scale[2][2] = {};
    float dscale[2] = {}, dshift[2] = {}; /* of the norm of c */
    /* gradients of the biases: summed before rounding, since the terms nearly cancel */
    float db_x[COLUMNS] = {}, db_h[COLUMNS] = {};
    Fetched f[2] = {};
    Moments of = {};
    bool cut[2] = {}; /* a reset lies between this step and the one after */
    int at[2];        /* row of this step; at · G · H stays below 2³¹ */
    const int step_stride = l.reverse ? -(int)l.batch : (int)l.batch;
    u32 masks = 0;
    float share = 0.0f, share_after = 0.0f; /* 1 / rows of this step, and of the step after */
    /* Load the inputs of step t, except the received sums. */
    auto prepare = [&](int t) {
        EACH_ROW if (ACTIVE(t)) {
            int unit = at[r] * HIDDEN + m.unit, old = unit - step_stride * HIDDEN;
            i64 start = (i64)m.row[r] * HIDDEN + m.unit;
            f[r].cut = cut_at(l, t, m.row[r], m.length[r]), f[r].first = t == 0 || f[r].cut;
            f[r].gates = load_early_gates(gates + unit * GATES, m.in[1]);
            f[r].dy = load_early_pair((const narrow *)l.dy + unit, m.in[1]);
            f[r].hat = load_early_floats(l.gh + unit * GATES, m.in[1]);
            if (LSTM) {
                f[r].old_c = load_pair(f[r].first ? (f[r].cut ? l.reset_c : l.c0) + start : l.c + old, m.in[1]);
                if (l.dcells) f[r].dcells = load_pair(l.dcells + unit, m.in[1]);
                if (holds_gate && !f[r].first)
                    EACH_UNIT f[r].held[u] = m.in[u] ? load_early(gates + (old + u) * GATES + GATES - 1) : EarlyLoad{0};
            }
            if (GRU) {
                const void *from = f[r].first ? (f[r].cut ? l.reset_h : l.h0) : l.y;
                f[r].old_h = load_early_pair((const narrow *)from + (f[r].first ? start : old), m.in[1]);
            }
        }
        if (m.in[0]) {
            of.var_h = load_early_floats(n.var_h + (t * HIDDEN + m.unit) * GATES, m.in[1]);
            if (LSTM) {
                of.mean_c = load_pair(n.mean_c + t * HIDDEN + m.unit, m.in[1]);
                of.var_c = load_pair(n.var_c + t * HIDDEN + m.unit, m.in[1]);
            }
        }
        prefetch_l2(l, gates, GATES * HIDDEN * sizeof(narrow), t - PREFETCH_STEPS);
        prefetch_l2(l, l.gh, GATES * HIDDEN * sizeof(float), t - PREFETCH_STEPS);
        prefetch_l2(l, l.dy, HIDDEN * sizeof(narrow), t - PREFETCH_STEPS);
        if (LSTM) prefetch_l2(l, l.c, HIDDEN * sizeof(float), t - PREFETCH_STEPS);
        if (GRU) prefetch_l2(l, l.y, HIDDEN * sizeof(narrow), t - PREFETCH_STEPS);
        masks = draw_masks(l, m, seeds, noises, t);
        if (l.lengths) share = counts_at(l, m, t).of_all;
    };
    /* Add the gradient that the product passes to step t. Its sum over the rows is zero but for rounding: see
     * Loop.balanced. */
    auto receive = [&](int t) {
        const int exchanges = (int)l.steps - 2 - t, buffer = exchanges & 1;
        await_buffer(buffer, exchanges >> 1 & 1, m);
        expect_bytes(buffer, m);
        float rec[2][2];
        EACH_INDEX(BLOCKS) {
            Message v = shared.received[buffer][i * THREADS + threadIdx.x];
            EACH_ROW EACH_UNIT {
                float part = received_sum(v, r, u) *
                             (SCALED ? shared.inverse_scale[buffer][SCALED ? m.warp : 0][i] : 1.0f);
                rec[r][u] = i ? rec[r][u] + part : part;
            }
        }
        bool alive[2];
        EACH_ROW alive[r] = ALIVE(t + 1);
        centre(rec, alive, share_after, shared.sums[2], m);
        EACH_ROW EACH_UNIT if (alive[r]) {
            dh[r][u] += l.scale_h ? rec[r][u] * h_scale[r][u] : rec[r][u];
            if (cut[r]) dreset_h[r][u] += dh[r][u], dreset_c[r][u] += dc[r][u], dh[r][u] = dc[r][u] = 0.0f;
        }
    };
    EACH_ROW {
        at[r] = (int)row_index(l, l.steps - 1, m.row[r], m.length[r]);
        EACH_UNIT if (m.in[u] && m.row[r] < l.batch) {
            i64 start = (i64)m.row[r] * HIDDEN + m.unit + u;
            dh[r][u] = l.dh[start];
            if (LSTM) dc[r][u] = l.dc[start];
            if (l.scale_h) h_scale[r][u] = widen(((const narrow *)l.scale_h)[start]);
        }
    }
    begin_cluster(m);
    share = counts_at(l, m, 0).of_all;
    prepare((int)l.steps - 1);

    for (int t = (int)l.steps - 1; t >= 0; t--) {
        bool alive[2];
        /* gradients of x's part, of h·Wh after norm and bias, and of h·Wh */
        float d[2][2][4] = {}, e[2][2][4] = {}, out[2][2][4] = {};
        /* dshown: gradient of the normalised, scaled c */
        float rstd[COLUMNS] = {}, du[2][2] = {}, dshown[2][2] = {}, hat_c[2][2] = {};
        Keep keep[2][2];
        EACH_GATE EACH_UNIT rstd[q * 2 + u] = inverse(of.var_h.at(u, q), n.eps);
        EACH_ROW EACH_UNIT alive[r] = ALIVE(t), keep[r][u] = keep_at(l, masks, noises[u], r, u);
#if LSTM
        /* Before the sums arrive: the normalised, scaled c, and the derivative of h by it. */
        float rstd_c[2], dcandidate[2][2], tc[2][2] = {}, slope[2][2] = {};
        EACH_UNIT rstd_c[u] = inverse(of_pair(of.var_c, u), n.eps);
        EACH_ROW EACH_UNIT if (alive[r]) {
            float gate = widen(f[r].gates, u, 3);
            float shown = lstm_candidate(l, widen(f[r].gates, u, 0), widen(f[r].gates, u, 1), widen(f[r].gates, u, 2),
                                         of_pair(f[r].old_c, u), keep[r][u]);
            hat_c[r][u] = (shown - of_pair(of.mean_c, u)) * rstd_c[u];
            tc[r][u] = tanh_approx(hat_c[r][u] * scale_c[u] + shift_c[u]);
            if (holds_gate && !f[r].first) gate = mix(gate, widen(f[r].held[u]), keep[r][u].update);
            slope[r][u] = gate * (1 - tc[r][u] * tc[r][u]);
        }
#endif
        if (t + 1 < l.steps) receive(t);
        EACH_ROW EACH_UNIT if (alive[r]) {
            dh[r][u] += widen(f[r].dy, u);
            du[r][u] = carried_h_back(l, dh[r][u], keep[r][u]);
        }
#if LSTM
        EACH_ROW EACH_UNIT if (alive[r]) {
            d[r][u][3] = lstm_output_back(l, du[r][u] * tc[r][u], widen(f[r].gates, u, 3), f[r].first, owed[r][u],
                keep[r][u]);
            dshown[r][u] = du[r][u] * slope[r][u];
        }
        EACH_ROW EACH_UNIT dcandidate[r][u] = dshown[r][u] * scale_c[u];
        moments_back<2>(dcandidate, hat_c, rstd_c, alive, share, shared.sums[1], m);
        EACH_ROW EACH_UNIT if (alive[r]) {
            dc[r][u] += of_pair(f[r].dcells, u);
            lstm_gates_back(l, d[r][u], widen(f[r].gates, u, 0), widen(f[r].gates, u, 1), widen(f[r].gates, u, 2),
                            of_pair(f[r].old_c, u), dcandidate[r][u], dc[r][u], keep[r][u]);
        }
#elif GRU
        EACH_ROW EACH_UNIT if (alive[r]) {
            float v = f[r].hat.at(u, 2) * scale_h[u][2] + bias[u];
            gru_back(l, d[r][u], e[r][u], widen(f[r].gates, u, 0), widen(f[r].gates, u, 1), widen(f[r].gates, u, 2), v,
                     widen(f[r].old_h, u), du[r][u], dh[r][u], keep[r][u]);
        }
#else
        EACH_ROW EACH_UNIT if (alive[r]) {
            float v = widen(f[r].gates, u, 0);
            d[r][u][0] = RELU ? (v > 0 ? du[r][u] : 0.0f) : du[r][u] * (1 - v * v);
        }
#endif
        {
            float dh_w[2][COLUMNS] = {}, hat[2][COLUMNS] = {};
            EACH_ROW EACH_GATE EACH_UNIT {
                dh_w[r][q * 2 + u] = (GRU ? e[r][u][q] : d[r][u][q]) * scale_h[u][q];
                hat[r][q * 2 + u] = f[r].hat.at(u, q);
            }
            moments_back<COLUMNS>(dh_w, hat, rstd, alive, share, shared.sums[LSTM ? 0 : t & 1], m);
            /* a row that has ended exchanges nothing with others */
            EACH_ROW EACH_UNIT EACH_GATE out[r][u][q] = dh_w[r][q * 2 + u];
        }
        send_product(shared, (int)l.steps - 1 - t & 1, out, w, m);
        /* Before the others' values arrive: inputs of the next step, and results. */
        const int this_row[2] = {at[0], at[1]};
        EACH_ROW at[r] -= step_stride, cut[r] = ALIVE(t) && f[r].cut;
        share_after = share;
        if (t > 0) prepare(t - 1);
        EACH_ROW {
            if (ACTIVE(t)) {
                int gate = (this_row[r] * HIDDEN + m.unit) * GATES;
                store_gates((narrow *)l.dgx + gate, d[r], m.in[1]);
                if (GRU) store_gates((narrow *)l.dsh + gate, e[r], m.in[1]);
                store_gates((narrow *)n.dgh + gate, out[r], m.in[1]);
            }
            EACH_UNIT {
                dscale[u] += dshown[r][u] * hat_c[r][u], dshift[u] += dshown[r][u];
                EACH_GATE db_x[q * 2 + u] += d[r][u][q], db_h[q * 2 + u] += e[r][u][q];
            }
        }
    }
    receive(-1);
    auto sum_over_bands = [&](float first, float second) { /* add two sums of a lane's index over all bands */
        float2 all = make_float2(0.0f, 0.0f);
        __syncthreads(); /* all threads have read the sums before */
        shared.sums[0][threadIdx.x] = make_float2(first, second);
        __syncthreads();
        EACH_INDEX(BANDS) {
            float2 band = shared.sums[0][(m.unit_group * BANDS + i) * 32 + m.lane];
            all.x += band.x, all.y += band.y;
        }
        return all;
    };
    if (LSTM) {
        const float2 all = sum_over_bands(sum_over_rows<2>(dscale, m.lane), sum_over_rows<2>(dshift, m.lane));
        const int unit = m.unit + own_index<2>(m.lane);
        if (m.band == 0 && unit < HIDDEN && writes_index<2>(m.lane)) n.dscale_c[unit] = all.x, n.dshift_c[unit] = all.y;
    }
    {
        const float2 all = sum_over_bands(sum_over_rows<COLUMNS>(db_x, m.lane), sum_over_rows<COLUMNS>(db_h, m.lane));
        const int number = own_index<COLUMNS>(m.lane), unit = m.unit + number % 2, to = unit * GATES + number / 2;
        if (m.band == 0 && number / 2 < GATES && unit < HIDDEN && writes_index<COLUMNS>(m.lane)) {
            n.db_x[to] = all.x;
            if (GRU) n.db_h[to] = all.y;
        }
    }
    EACH_ROW EACH_UNIT if (m.in[u] && m.row[r] < l.batch) {
        i64 start = (i64)m.row[r] * HIDDEN + m.unit + u;
        l.dh[start] = dh[r][u];
        if (LSTM) l.dc[start] = dc[r][u];
        if (l.resets) {
            l.dreset_h[start] = dreset_h[r][u];
            if (LSTM) l.dreset_c[start] = dreset_c[r][u];
        }
    }
}
#endif
