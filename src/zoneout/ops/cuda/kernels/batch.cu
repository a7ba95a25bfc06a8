/* All steps in one launch with recurrent batch norm: a block owns a few units for the whole batch, so that the moments are
 * taken inside of it, and the blocks of one cluster exchange what enters the product once a step.
 *
 * Compiled with BACK (0 forwards, 1 backwards), HIDDEN, BLOCKS (of the cluster), PARTS (of 8 units that a block has), BANDS
 * (of 16 rows), OWN (pieces of the weights that are in registers; the others lie in shared memory), PAIRED (two neighbouring
 * numbers may be read at once) and HAS; where there is no noise but zoneout with a mask for each unit CELL_MODE and
 * HIDDEN_MODE are those of the two streams, and KNOWN says so.
 *
 * A warp has a band of one part: a tile of sums for each gate, where a thread finds all gates of two units of two rows. The
 * same thread of another block has other units of the same rows. So what a thread sends is what the same lane over there
 * needs, and nothing has to be rearranged. In memory the gates lie unit by unit, so that those of a thread's two units are
 * one piece of a row. Forwards each block sends its h to all, who take the product with their own columns of W_h. Backwards
 * each takes the product of its derivatives with all of W_h's columns and sends every block the sums for its units: half as
 * much to send as the derivatives themselves, a quarter in TF32.
 *
 * A processor gets some 22 bytes a cycle to others, so what goes around is of 16 bits where these are enough. In TF32, too:
 * h, and derivatives times a power of two that each warp finds for what it sends; it sends along what undoes it. (Behind a
 * batch norm no row's are much smaller than those of the others.)
 *
 * What is sent counts itself, by bytes: a warp goes on when all of its rows are there. Two buffers take turns, and nobody has to
 * say that one may be written again: whoever has all of step t knows that all have sent it, after they had read step t - 1.
 */
#define WARPS (BANDS * PARTS)
#define THREADS (32 * WARPS)
#define GE (BACK ? (G == 3 ? 4 : G) : 1)       /* numbers of a unit in what enters the product */
#define SCALED (BACK && !TYPE && PARTS == 1)   /* TF32 by numbers of half precision, times powers of two */
#define SENT (TYPE || (BACK ? !SCALED : RELU) ? TYPE : 2) /* the type of what enters the product; h is between -1 and 1 */
#define EACH (SENT ? 2 : 1)                    /* numbers of a word */
#define OF_PART ((2 * GE + EACH - 1) / EACH)   /* words of two units of a row */
#define KP ((OF_PART + 1) / 2)                 /* k-steps of a part, backwards; a k-step takes two words */
#define KS (BACK ? PARTS * KP : (BLOCKS * PARTS * OF_PART + 1) / 2)
#define TILES (BACK ? BLOCKS : G)              /* of 8 columns of the right factor */
#define REST (KS * TILES - OWN)                /* pieces of weights in shared memory */
#define CHAINS (G > 1 ? 1 : 4)                 /* of sums, so that one product need not wait for the one before */
#define COLUMNS (G > 1 ? 8 : 2)                /* numbers of h·Wh of two units, a power of two */
#define NUMBERS (2 * G)                        /* of two units of a row, as they lie: [unit][gate] */
#define AHEAD 6                                /* steps, for what is brought into the L2 */

#define EACH_ROW _Pragma("unroll") for (int r = 0; r < 2; r++)
#define EACH_UNIT _Pragma("unroll") for (int u = 0; u < 2; u++)
#define EACH_GATE _Pragma("unroll") for (int q = 0; q < G; q++)
#define EACH_OF(K) _Pragma("unroll") for (int i = 0; i < (K); i++)

#if SENT
typedef uint2 Slot; /* what a thread sends to a block */
#else
typedef uint4 Slot;
#endif

struct Shared {
    Slot sent[2][BLOCKS * THREADS];                     /* [turn][from][thread] */
    uint4 lent[BACK && PARTS > 1 ? KP * THREADS : 1];   /* what enters the product, to the block's other part */
    float2 sums[BACK ? 3 : 2][THREADS];                 /* of moments; taking turns, since somebody may still be reading */
    float undo[2][SCALED ? WARPS : 1][16];              /* [turn][warp][from]: to be multiplied with what has come */
    int lengths[BANDS * 16];
    u64 there[2][WARPS];                                /* [turn]: what a warp waits for; forwards one for all parts of a band */
};

__device__ __forceinline__ Shared &here() {
    extern __shared__ __align__(16) char shared[];
    return *(Shared *)shared;
}

/* --- numbers ---------------------------------------------------------------------------------------- */

/* Volatile, so that it is done where it stands: while others are waited for. */
__device__ __forceinline__ float inverse(float var, double eps) {
    float out;
    asm volatile("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(var + (float)eps));
    return out;
}

/* Two neighbouring units of a row; of the second it is said whether it is there. */
struct LateTwo { /* see Late */
    u32 bits[PAIRED && TYPE ? 1 : 2];
};
__device__ __forceinline__ LateTwo late_two(const narrow *from, bool second) {
    LateTwo out;
#if PAIRED && TYPE
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(out.bits[0]) : "l"(from));
#elif PAIRED
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(out.bits[0]), "=r"(out.bits[1]) : "l"(from));
#else
    out.bits[0] = late(from).bits;
    out.bits[1] = second ? late(from + 1).bits : 0;
#endif
    return out;
}
__device__ __forceinline__ float widen(const LateTwo &v, int u) {
#if PAIRED && TYPE
    return widen((narrow)(v.bits[0] >> 16 * u));
#else
    return widen(Late{v.bits[u]});
#endif
}

/* Words of memory, as many at once as lie even. */
template <int WORDS> __device__ __forceinline__ void late_words(u32 *to, const void *at) {
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
template <int WORDS> __device__ __forceinline__ void put_words(void *at, const u32 *from) {
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

struct LateRow { /* the gates of two neighbouring units of a row; see Late */
    u32 bits[PAIRED && TYPE ? G : NUMBERS];
};
__device__ __forceinline__ LateRow late_row(const narrow *from, bool second) {
    LateRow out;
    if (PAIRED) {
        late_words<PAIRED && TYPE ? G : NUMBERS>(out.bits, from);
    } else {
        EACH_OF(NUMBERS) out.bits[i] = i < G || second ? late(from + i).bits : 0;
    }
    return out;
}
__device__ __forceinline__ float widen(const LateRow &v, int u, int q) {
    const int n = u * G + q;
#if PAIRED && TYPE
    return widen((narrow)(v.bits[n / 2] >> 16 * (n % 2)));
#else
    return widen(Late{v.bits[n]});
#endif
}

struct LateFloats {
    u32 bits[NUMBERS];
    __device__ __forceinline__ float at(int u, int q) const { return __uint_as_float(bits[u * G + q]); }
};
__device__ __forceinline__ LateFloats late_floats(const float *from, bool second) {
    LateFloats out;
    if (PAIRED) {
        late_words<NUMBERS>(out.bits, from);
    } else {
        EACH_OF(NUMBERS) out.bits[i] = i < G || second ? __float_as_uint(from[i]) : 0;
    }
    return out;
}

__device__ __forceinline__ void put_floats(float *to, const float (&v)[2][4], bool second) {
    if (PAIRED) {
        u32 words[NUMBERS];
        EACH_OF(NUMBERS) words[i] = __float_as_uint(v[i / G][i % G]);
        put_words<NUMBERS>(to, words);
    } else {
        EACH_OF(NUMBERS) if (i < G || second) to[i] = v[i / G][i % G];
    }
}
__device__ __forceinline__ void put_row(narrow *to, const float (&v)[2][4], bool second) {
#if !TYPE
    put_floats(to, v, second);
#else
    if (PAIRED) {
        u32 words[G];
        EACH_OF(G) words[i] = pair(v[2 * i / G][2 * i % G], v[(2 * i + 1) / G][(2 * i + 1) % G]);
        put_words<G>(to, words);
    } else {
        EACH_OF(NUMBERS) if (i < G || second) to[i] = narrowed(v[i / G][i % G]);
    }
#endif
}

__device__ __forceinline__ float2 two_at(const float *from, bool second) {
    return PAIRED ? *(const float2 *)from : make_float2(from[0], second ? from[1] : 0.0f);
}
__device__ __forceinline__ float of_two(const float2 &v, int u) { return u ? v.y : v.x; }
__device__ __forceinline__ void put_two(float *to, float low, float high, bool second) {
    if (PAIRED) {
        *(float2 *)to = make_float2(low, high);
    } else {
        to[0] = low;
        if (second) to[1] = high;
    }
}
__device__ __forceinline__ void put_two_narrow(narrow *to, float low, float high, bool second) {
#if !TYPE
    put_two(to, low, high, second);
#else
    if (PAIRED) {
        *(u32 *)to = pair(low, high);
    } else {
        to[0] = narrowed(low);
        if (second) to[1] = narrowed(high);
    }
#endif
}

/* --- what a thread has to do ------------------------------------------------------------------------ */

struct Mine { /* two units of two rows */
    int warp, lane, part, band, unit;
    int senders; /* lanes of the warp that have a row: others send nothing, and what they read does not matter */
    bool in[2];            /* whether there are such units */
    int row[2], length[2]; /* a row that is not there has no steps */
    u32 example[2];
};

#define ALIVE(t) (HAS_LENGTHS ? (t) < m.length[r] : m.length[r] > 0)
#define THERE(t) (m.in[0] && ALIVE(t))

__device__ __forceinline__ Mine mine(const Loop &l) {
    Mine m;
    m.warp = threadIdx.x / 32, m.lane = threadIdx.x % 32, m.part = m.warp / BANDS, m.band = m.warp % BANDS;
    m.unit = (blockIdx.x * PARTS + m.part) * 8 + m.lane % 4 * 2;
    m.in[0] = m.unit < HIDDEN, m.in[1] = m.unit + 1 < HIDDEN;
    m.senders = min(8, (int)l.batch - m.band * 16) * 4;
    EACH_ROW {
        m.row[r] = m.band * 16 + r * 8 + m.lane / 4;
        bool there = m.row[r] < l.batch;
        m.length[r] = there ? (int)length_of(l, m.row[r]) : 0;
        m.example[r] = there ? (u32)l.examples[m.row[r]] : 0;
        if (m.part == 0 && m.lane % 4 == 0) here().lengths[m.row[r]] = m.length[r];
    }
    return m;
}

/* --- the cluster ------------------------------------------------------------------------------------ */

__device__ __forceinline__ u32 of_shared(const void *at) { return (u32)__cvta_generic_to_shared(at); }
__device__ __forceinline__ u64 *counter_of(int turn, const Mine &m) { return &here().there[turn][BACK ? m.warp : m.band]; }

/* What is to come in a turn; counted before or after it comes. */
__device__ __forceinline__ void expect(int turn, const Mine &m) {
    const u32 bytes = BLOCKS * ((BACK ? 1 : PARTS) * m.senders * sizeof(Slot) + SCALED * 4);
    if (m.lane == 0 && (BACK || m.part == 0))
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(of_shared(counter_of(turn, m))), "r"(bytes)
                     : "memory");
}

/* Until it is there; `phase` says whether the turn has been this one's an odd number of times before. */
__device__ __forceinline__ void await_turn(int turn, u32 phase, const Mine &m) {
    const u32 at = of_shared(counter_of(turn, m));
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at), "r"(phase) : "memory");
    } while (!done);
}

/* All blocks of the cluster begin with counters that wait for the first two turns. */
__device__ __forceinline__ void begin(const Mine &m) {
    if (threadIdx.x < 2 * WARPS)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(of_shared((u64 *)here().there + threadIdx.x)), "r"(1) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    expect(0, m), expect(1, m);
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The same place in another block. */
__device__ __forceinline__ u32 of_block(const void *own, int block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(of_shared(own)), "r"(block));
    return there;
}

/* To another block, where the same warp waits for it. */
__device__ __forceinline__ void send(int turn, const Slot &v, int to, const Mine &m) {
    if (m.lane >= m.senders) return;
    const u32 there = of_block(here().sent[turn] + blockIdx.x * THREADS + threadIdx.x, to);
    const u32 counter = of_block(counter_of(turn, m), to);
#if !SENT
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(there), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(counter) : "memory");
#else
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];"
                 ::"r"(there), "r"(v.x), "r"(v.y), "r"(counter) : "memory");
#endif
}

/* A lane for each block. */
__device__ __forceinline__ void send_undo(int turn, float v, const Mine &m) {
    if (m.lane >= BLOCKS) return;
    const u32 there = of_block(&here().undo[turn][SCALED ? m.warp : 0][blockIdx.x], m.lane);
    const u32 counter = of_block(counter_of(turn, m), m.lane);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 ::"r"(there), "r"(__float_as_uint(v)), "r"(counter) : "memory");
}

/* The i-th block to send to: at any time each is sent to by another. */
__device__ __forceinline__ int block_at(int i) {
    int to = blockIdx.x + i;
    return to < BLOCKS ? to : to - BLOCKS;
}

/* --- the product ------------------------------------------------------------------------------------ */

/* Forwards the largest numbers become the largest of half precision, where floats go so; NaN stays. */
__device__ __forceinline__ float within(float v) {
    return SENT == TYPE || BACK ? v : v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
}

/* Word `word` of the depth and a column of a tile, as a thread of column pair `from` of the left factor has it. */
__device__ __forceinline__ u32 weights_at(const Loop &l, float by, int part, int tile, int column, int word, int from) {
    auto number = [&](int n) { /* of the thread's */
#if BACK
        int p = word / (2 * KP) /* of the block */, gate = n % GE;
        int source = (blockIdx.x * PARTS + p) * 8 + from * 2 + n / GE;
        int unit = (block_at(tile) * PARTS + part) * 8 + column;
        bool in = n < 2 * GE && gate < G;
#else
        int gate = tile, source = n / 2 * 8 + from * 2 + n % 2, unit = (blockIdx.x * PARTS + part) * 8 + column;
        bool in = true;
#endif
        if (!in || source >= HIDDEN || unit >= HIDDEN) return 0.0f;
        int row = (BACK ? source : unit) * G + gate, at = BACK ? unit : source;
        return widen(((const narrow *)l.w_hh)[row * HIDDEN + at]) * by;
    };
    const int n = (BACK ? word % (2 * KP) : word) * EACH;
#if SENT
    return pair_as<SENT>(within(number(n)), within(number(n + 1)));
#else
    return bits(number(n));
#endif
}

struct Weights {
    u32 own[OWN > 0 ? OWN : 1][2];
    int scale; /* SCALED: the exponent of what they have been multiplied with */
    const uint2 *rest; /* [REST][32 lanes] of the part */
};

__device__ __forceinline__ void load_weights(const Loop &l, Weights &w, const Mine &m) {
    uint2 *to = (uint2 *)(&here() + 1) + m.part * REST * 32 + m.lane;
    w.rest = to;
    float by = 1.0f;
#if SCALED
    const int own = blockIdx.x * 8, count = min(8, HIDDEN - own) * G * HIDDEN;
    u32 top = 0;
    for (int i = m.lane; i < count; i += 32) top = max(top, size_of(((const float *)l.w_hh)[own * G * HIDDEN + i]));
    w.scale = max(-100, min(scale_for(largest_of(top)) - 14, 20)), by = two_to(w.scale); /* the largest is between 1 and 2 */
#endif
#pragma unroll
    for (int s = 0; s < KS; s++)
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const int i = s * TILES + tile;
            u32 low = weights_at(l, by, m.part, tile, m.lane / 4, s * 2, m.lane % 4);
            u32 high = weights_at(l, by, m.part, tile, m.lane / 4, s * 2 + 1, m.lane % 4);
            if (i < OWN) {
                w.own[i < OWN ? i : 0][0] = low, w.own[i < OWN ? i : 0][1] = high;
            } else if (m.band == 0) {
                to[(i - OWN) * 32] = make_uint2(low, high);
            }
        }
}

/* One k-step of one tile; those in shared memory are read again each time. */
__device__ __forceinline__ void add_step(float *sum, const u32 *a, const Weights &w, int s, int tile) {
    const int i = s * TILES + tile;
    if (i < OWN) {
        const u32 *one = w.own[i < OWN ? i : 0];
        multiply_as<SENT>(sum, a, one[0], one[1]);
    } else {
        uint2 one = w.rest[(i - OWN) * 32];
        multiply_as<SENT>(sum, a, one.x, one.y);
    }
}

/* --- memory ----------------------------------------------------------------------------------------- */

/* What step t reads of an array, into the L2: all threads of the cluster bring a line each. Where rows are turned around
 * within their lengths some of it is brought too early. */
__device__ __forceinline__ void bring(const Loop &l, const void *from, int width, int t) {
    if (t < 0 || t >= l.steps) return;
    i64 size = l.batch * width;
    const char *begin = (const char *)from + position(l, t, l.steps) * size;
    for (int at = (blockIdx.x * THREADS + threadIdx.x) * 128; at < size; at += BLOCKS * THREADS * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(begin + at));
}

/* --- noise ------------------------------------------------------------------------------------------ */

struct Seeds {
    u64 cell, hidden, update;
    bool same; /* one word serves cell and hidden state */
};

__device__ __forceinline__ Seeds seeds_of(const Loop &l) {
    Seeds s;
    s.cell = l.cell.mode == DRAWN ? (u64)*l.cell.seed : 0;
    s.hidden = l.hidden_state.mode == DRAWN ? (u64)*l.hidden_state.seed : 0;
    s.update = l.update.mode == DRAWN ? (u64)*l.update.seed : 0;
    Noise one = {0, 0.0f, s.cell}, two = {0, 0.0f, s.hidden};
    s.same = l.cell.mode == DRAWN && (KNOWN || same_words(l.cell, one, l.hidden_state, two));
    return s;
}

/* The words of both units of both rows. Four units share a draw, so of two lanes with the same four each draws for one of
 * the rows; all lanes of a warp must come here. */
__device__ __forceinline__ void draw_words(u32 (&word)[2][2], const Loop &l, const Mine &m, const Stream &s, u64 seed, int t) {
    const bool odd = m.lane % 2;
    u32 w[4], step = step_of(l, t, odd ? m.length[1] : m.length[0]), example = odd ? m.example[1] : m.example[0];
    philox(w, seed, s.sees_unit ? m.unit / 4 : 0, s.sees_example ? example : 0, s.sees_step ? step : 0, s.plane);
    if (!s.sees_unit) w[1] = w[2] = w[3] = w[0];
    u32 low = __shfl_xor_sync(~0u, odd ? w[0] : w[2], 1), high = __shfl_xor_sync(~0u, odd ? w[1] : w[3], 1);
    word[0][0] = odd ? low : w[0], word[0][1] = odd ? high : w[1];
    word[1][0] = odd ? w[2] : low, word[1][1] = odd ? w[3] : high;
}

/* Bits [row][unit]: whether the old value is kept. */
__device__ __forceinline__ u32 below(const u32 (&word)[2][2], const Stream &s, u32 limit0, u32 limit1) {
    u32 out = 0;
    EACH_ROW EACH_UNIT {
        u32 v = word[r][u] >> (s.high ? 16 : 0) & 0xFFFF;
        out |= (u32)(v < (u ? limit1 : limit0)) << (r * 2 + u);
    }
    return out;
}

/* Bits [stream][row][unit] of a step. */
__device__ __forceinline__ u32 draw(const Loop &l, const Mine &m, const Seeds &seeds, const Noises (&n)[2], int t) {
    u32 word[2][2] = {}, kept = 0;
    if (l.cell.mode == DRAWN) {
        draw_words(word, l, m, l.cell, seeds.cell, t);
        kept = below(word, l.cell, n[0].cell.threshold, n[1].cell.threshold);
    }
    if (l.hidden_state.mode == DRAWN) {
        if (!seeds.same) draw_words(word, l, m, l.hidden_state, seeds.hidden, t);
        kept |= below(word, l.hidden_state, n[0].hidden.threshold, n[1].hidden.threshold) << 4;
    }
    if (l.update.mode == DRAWN) {
        draw_words(word, l, m, l.update, seeds.update, t);
        kept |= below(word, l.update, n[0].update.threshold, n[1].update.threshold) << 8;
    }
    return kept;
}

__device__ __forceinline__ Keep keep_at(const Loop &l, u32 kept, const Noises &n, int r, int u) {
    const int at = r * 2 + u;
    return {l.cell.mode == EXPECTED ? n.cell.rate : kept >> at & 1 ? 1.0f : 0.0f,
            l.hidden_state.mode == EXPECTED ? n.hidden.rate : kept >> (at + 4) & 1 ? 1.0f : 0.0f,
            l.update.mode == EXPECTED ? n.update.rate : kept >> (at + 8) & 1 ? 1.0f : 0.0f};
}

/* --- norms ------------------------------------------------------------------------------------------ */

/* How many rows of a band take part in a step; all lanes of a warp must come here. */
__device__ __forceinline__ int rows_at(const Loop &l, int band, int t, int lane) {
    int left = (int)l.batch - band * 16;
    if (!l.lengths) return left < 16 ? left : 16;
    return __popc(__ballot_sync(~0u, lane < 16 && here().lengths[band * 16 + lane % 16] > t));
}

struct Counts {
    float own, share, weight[BANDS]; /* one over the rows of the own band and of all, and the share of each band */
};

__device__ __forceinline__ Counts counts_at(const Loop &l, const Mine &m, int t) {
    Counts c;
    int total = 0, rows[BANDS], own = rows_at(l, m.band, t, m.lane);
    EACH_OF(BANDS) rows[i] = rows_at(l, i, t, m.lane), total += rows[i];
    c.own = own ? __fdividef(1.0f, own) : 0.0f, c.share = total ? __fdividef(1.0f, total) : 0.0f;
    EACH_OF(BANDS) c.weight[i] = rows[i] * c.share;
    return c;
}

/* The number of COUNT that a lane has after `over_rows`, and a lane with the same columns that has a number. */
template <int COUNT>
__device__ __forceinline__ int number_of(int lane) {
    return lane / 4 * COUNT / 8;
}
template <int COUNT>
__device__ __forceinline__ float from_number(float v, int number, int lane) {
    return __shfl_sync(~0u, v, number * (32 / COUNT) + lane % 4);
}

/* `a` where the mask is all ones, `b` where it is zero: without a branch. */
__device__ __forceinline__ float choose(u32 mask, float a, float b) {
    return __uint_as_float((__float_as_uint(a) & mask) | (__float_as_uint(b) & ~mask));
}

/* Ones where a bit of the lane is set; the compiler may not know, or it would branch. */
__device__ __forceinline__ u32 mask_of(int lane, int far) {
    u32 mask = lane & far ? ~0u : 0;
    asm("" : "+r"(mask));
    return mask;
}

/* Sums over the eight lanes with the same columns; each is left with one of COUNT numbers. */
template <int COUNT>
__device__ __forceinline__ float over_rows(float (&v)[COUNT], int lane) {
#pragma unroll
    for (int far = 16; far >= 4; far /= 2) {
        const int left = COUNT * far / 32;
        if (left) {
            const u32 mask = mask_of(lane, far);
            EACH_OF(left) {
                float give = choose(mask, v[i], v[i + left]), keep = choose(mask, v[i + left], v[i]);
                v[i] = keep + __shfl_xor_sync(~0u, give, far);
            }
        } else {
            v[0] += __shfl_xor_sync(~0u, v[0], far);
        }
    }
    return v[0];
}

/* A lane's own number. */
template <int COUNT>
__device__ __forceinline__ float own_of(float (&v)[COUNT], int lane) {
#pragma unroll
    for (int far = 16; far >= 4; far /= 2) {
        const int left = COUNT * far / 32;
        EACH_OF(left) v[i] = choose(mask_of(lane, far), v[i + left], v[i]);
    }
    return v[0];
}

/* Mean and one over the deviation of COUNT columns. A band takes its sums from the first of its rows, and all of them
 * from the first band: rows may be close together, and the mean of rows that are alike is to be that row. Returned are
 * mean and variance of the lane's number. */
template <int COUNT>
__device__ __forceinline__ float2 moments(float (&mean)[COUNT], float (&rstd)[COUNT], const float (&v)[2][COUNT],
                                          const bool (&alive)[2], const Counts &counts, float2 *sums, double eps,
                                          const Mine &m) {
    float first[COUNT], one[COUNT], two[COUNT];
    u32 low = 1, high = 0; /* lanes that are alive; without lengths the first is */
    if (HAS_LENGTHS) low = __ballot_sync(~0u, alive[0]), high = __ballot_sync(~0u, alive[1]);
    const int from = (low ? __ffs(low) : high ? __ffs(high) : 1) - 1 + m.lane % 4; /* lanes of a row live and end together */
    EACH_OF(COUNT) first[i] = __shfl_sync(~0u, low ? v[0][i] : v[1][i], from);
    EACH_OF(COUNT) {
        float d0 = alive[0] ? v[0][i] - first[i] : 0.0f, d1 = alive[1] ? v[1][i] - first[i] : 0.0f;
        one[i] = d0 + d1, two[i] = d0 * d0 + d1 * d1;
    }
    float sum = over_rows<COUNT>(one, m.lane), squares = over_rows<COUNT>(two, m.lane), off = sum * counts.own;
    float2 own = make_float2(own_of<COUNT>(first, m.lane) + off, fmaxf(squares - sum * off, 0.0f));
    sums[threadIdx.x] = counts.own > 0.0f ? own : make_float2(0.0f, 0.0f);
    __syncthreads();
    float2 band[BANDS];
    EACH_OF(BANDS) band[i] = sums[(m.part * BANDS + i) * 32 + m.lane];
    float near = band[0].x; /* of the first band with rows that are alive */
    if (HAS_LENGTHS) EACH_OF(BANDS) near = counts.weight[BANDS - 1 - i] > 0.0f ? band[BANDS - 1 - i].x : near;
    own = make_float2(0.0f, 0.0f);
    EACH_OF(BANDS) own.x += counts.weight[i] * (band[i].x - near);
    own.x += near;
    EACH_OF(BANDS) {
        float d = band[i].x - own.x;
        own.y += band[i].y * counts.share + counts.weight[i] * d * d;
    }
    float scale = inverse(own.y, eps);
    EACH_OF(COUNT) mean[i] = from_number<COUNT>(own.x, i, m.lane), rstd[i] = from_number<COUNT>(scale, i, m.lane);
    return own;
}

/* From the derivatives of what was normalised and scaled, times the scale, to those of what it was before. */
template <int COUNT>
__device__ __forceinline__ void moments_back(float (&d)[2][COUNT], const float (&hat)[2][COUNT], const float (&rstd)[COUNT],
                                             const bool (&alive)[2], float share, float2 *sums, const Mine &m) {
    float one[COUNT], two[COUNT];
    EACH_OF(COUNT) {
        float d0 = alive[0] ? d[0][i] : 0.0f, d1 = alive[1] ? d[1][i] : 0.0f;
        one[i] = d0 + d1, two[i] = d0 * hat[0][i] + d1 * hat[1][i];
    }
    float sum = over_rows<COUNT>(one, m.lane), with_hat = over_rows<COUNT>(two, m.lane);
    sums[threadIdx.x] = make_float2(sum, with_hat);
    __syncthreads();
    sum = with_hat = 0.0f;
    EACH_OF(BANDS) {
        float2 band = sums[(m.part * BANDS + i) * 32 + m.lane];
        sum += band.x, with_hat += band.y;
    }
    sum *= share, with_hat *= share;
    EACH_OF(COUNT) {
        float mean = from_number<COUNT>(sum, i, m.lane), slope = from_number<COUNT>(with_hat, i, m.lane);
        EACH_ROW d[r][i] = rstd[i] * (d[r][i] - mean - hat[r][i] * slope);
    }
}

/* --- forwards --------------------------------------------------------------------------------------- */
#if !BACK
/* h times the block's columns: c[row][unit] of each gate. */
__device__ __forceinline__ void product(float (&sum)[CHAINS][G][4], const Weights &w, const Slot *sent, const Mine &m) {
    const Slot *from = sent + m.band * 32 + m.lane;
#pragma unroll
    for (int s = 0; s < KS; s++) {
#if SENT
        uint2 low = from[s * 2 * BANDS * 32], high = make_uint2(0, 0);
        if (s * 2 + 1 < BLOCKS * PARTS) high = from[(s * 2 + 1) * BANDS * 32];
        u32 a[4] = {low.x, low.y, high.x, high.y};
#else
        uint4 v = from[s * BANDS * 32];
        u32 a[4] = {v.x, v.y, v.z, v.w};
#endif
        EACH_GATE add_step(sum[s % CHAINS][q], a, w, s, q);
    }
}

/* Both rows and units, as they enter the product of all blocks. */
__device__ __forceinline__ void send_all(int turn, float (&v)[2][2], const Mine &m) {
#if SENT
    EACH_ROW EACH_UNIT v[r][u] = within(v[r][u]);
    Slot slot = make_uint2(pair_as<SENT>(v[0][0], v[0][1]), pair_as<SENT>(v[1][0], v[1][1]));
#else
    Slot slot = make_uint4(bits(v[0][0]), bits(v[1][0]), bits(v[0][1]), bits(v[1][1]));
#endif
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) send(turn, slot, block_at(i), m);
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    forward(const Loop given, const Norm n) {
    Shared &shared = here();
    Loop l = given;
    simplify(l);
    const Mine m = mine(l);
    narrow *gates = (narrow *)l.gates;
    Weights w;
    load_weights(l, w, m);
    const Seeds seeds = seeds_of(l);
    Noises noises[2] = {};
    float bias[2][G] = {}, scale_h[2][G] = {}, scale_c[2] = {}, shift_c[2] = {}; /* x's part comes with its own bias */
    EACH_UNIT if (m.in[u]) {
        noises[u] = noises_of(l, m.unit + u);
        EACH_GATE {
            if (l.b_h) bias[u][q] = widen(((const narrow *)l.b_h)[(m.unit + u) * G + q]);
            scale_h[u][q] = n.scale_h[(m.unit + u) * G + q];
        }
        if (LSTM) scale_c[u] = n.scale_c[m.unit + u], shift_c[u] = n.shift_c[m.unit + u];
    }

    float h[2][2] = {}, state[2][2] = {}, o[2][2] = {}, enters[2][2] = {}; /* enters: what h is multiplied with */
    float a[2][2][4] = {}, hat[2][2][4] = {};
    LateRow pre[2] = {}; /* x's part */
    bool cut[2] = {}, cut_next[2] = {};
    int at[2]; /* row of this step; at · G · H stays below 2³¹ */
    const int forth = l.reverse ? -(int)l.batch : (int)l.batch;
    u32 kept = 0;
    Counts counts = {};
    /* What step t needs beside h. */
    auto prepare = [&](int t) {
        EACH_ROW if (THERE(t)) {
            pre[r] = late_row(gates + (at[r] * HIDDEN + m.unit) * G, m.in[1]);
            cut_next[r] = t + 1 < m.length[r] && cut_at(l, t + 1, m.row[r], m.length[r]);
        }
        bring(l, gates, G * HIDDEN * sizeof(narrow), t + AHEAD);
        kept = draw(l, m, seeds, noises, t);
        if (l.lengths) counts = counts_at(l, m, t);
    };
    EACH_ROW {
        at[r] = (int)at_of(l, 0, m.row[r], m.length[r]);
        if (THERE(0)) cut[r] = cut_at(l, 0, m.row[r], m.length[r]);
        EACH_UNIT if (ALIVE(0) && m.in[u]) {
            i64 start = (i64)m.row[r] * HIDDEN + m.unit + u;
            h[r][u] = start_h(l, cut[r], start);
            if (LSTM) state[r][u] = start_c(l, cut[r], start);
            enters[r][u] = l.scale_h ? widen(((const narrow *)l.scale_h)[start]) : 1.0f;
        }
    }
    begin(m);
    counts = counts_at(l, m, 0);
    {
        float out[2][2];
        EACH_ROW EACH_UNIT out[r][u] = l.scale_h ? h[r][u] * enters[r][u] : h[r][u];
        send_all(0, out, m);
    }
    prepare(0);

    for (int t = 0; t < l.steps; t++) {
        await_turn(t & 1, t >> 1 & 1, m);
        expect(t & 1, m);
        float sum[CHAINS][G][4] = {};
        product(sum, w, shared.sent[t & 1], m);
        bool alive[2];
        float v[2][COLUMNS] = {}, mean[COLUMNS], rstd[COLUMNS];
        EACH_ROW {
            alive[r] = ALIVE(t);
            EACH_GATE EACH_UNIT {
                float &to = v[r][q * 2 + u] = sum[0][q][r * 2 + u];
#pragma unroll
                for (int i = 1; i < CHAINS; i++) to += sum[i][q][r * 2 + u];
            }
        }
        float2 of_h = moments<COLUMNS>(mean, rstd, v, alive, counts, shared.sums[LSTM ? 0 : t & 1], n.eps, m), of_c = make_float2(0.0f, 0.0f);
        EACH_ROW EACH_GATE EACH_UNIT {
            const int i = q * 2 + u;
            hat[r][u][q] = (v[r][i] - mean[i]) * rstd[i];
            v[r][i] = hat[r][u][q] * scale_h[u][q] + bias[u][q];
        }
        Keep keep[2][2];
        float shows[2][2] = {};
        EACH_ROW EACH_UNIT {
            keep[r][u] = keep_at(l, kept, noises[u], r, u);
            if (cut[r] && m.in[u]) {
                i64 start = (i64)m.row[r] * HIDDEN + m.unit + u;
                h[r][u] = start_h(l, true, start);
                if (LSTM) state[r][u] = start_c(l, true, start);
            }
#if LSTM
            EACH_GATE {
                float sums = widen(pre[r], u, q) + v[r][q * 2 + u];
                a[r][u][q] = q == 2 ? tanh_at(sums) : sigmoid_at(sums);
            }
            shows[r][u] = lstm_candidate(l, a[r][u][0], a[r][u][1], a[r][u][2], state[r][u], keep[r][u]);
            state[r][u] = alive[r] ? carried_c(l, shows[r][u], state[r][u], keep[r][u]) : state[r][u];
#endif
        }
#if LSTM
        {
            float mean_c[2], rstd_c[2];
            of_c = moments<2>(mean_c, rstd_c, shows, alive, counts, shared.sums[1], n.eps, m);
            EACH_ROW EACH_UNIT shows[r][u] = (shows[r][u] - mean_c[u]) * rstd_c[u] * scale_c[u] + shift_c[u];
        }
#endif
        float out[2][2];
        EACH_ROW EACH_UNIT {
#if LSTM
            float gate = a[r][u][3];
            if (l.update.mode && l.update.hold && t && !cut[r]) gate = mix(gate, o[r][u], keep[r][u].update);
            o[r][u] = a[r][u][3];
            float candidate = gate * tanh_at(shows[r][u]);
#elif GRU
            float reset = sigmoid_at(widen(pre[r], u, 0) + v[r][u]), z = sigmoid_at(widen(pre[r], u, 1) + v[r][2 + u]);
            float new_h = tanh_at(fmaf(reset, v[r][4 + u], widen(pre[r], u, 2))), update = (1 - z) * new_h;
            a[r][u][0] = reset, a[r][u][1] = z, a[r][u][2] = new_h;
            if (l.update.mode) update = less(update, keep[r][u].update);
            float candidate = fmaf(z, h[r][u], update);
#else
            float sums = widen(pre[r], u, 0) + v[r][u], candidate = RELU ? fmaxf(sums, 0.0f) : tanh_at(sums);
            a[r][u][0] = candidate;
#endif
            h[r][u] = alive[r] ? carried_h(l, candidate, h[r][u], keep[r][u]) : h[r][u];
            out[r][u] = h[r][u];
            if (cut_next[r] && m.in[u]) out[r][u] = start_h(l, true, (i64)m.row[r] * HIDDEN + m.unit + u);
            if (l.scale_h) out[r][u] *= enters[r][u];
        }
        if (t + 1 < l.steps) send_all((t + 1) & 1, out, m);
        /* Until all have sent: what the next step needs, and results. */
        const int here_at[2] = {at[0], at[1]};
        EACH_ROW at[r] += forth, cut[r] = cut_next[r];
        if (t + 1 < l.steps) prepare(t + 1);
        EACH_ROW {
            if (THERE(t)) {
                int unit = here_at[r] * HIDDEN + m.unit;
                put_two_narrow((narrow *)l.y + unit, h[r][0], h[r][1], m.in[1]);
                if (LSTM) put_two(l.c + unit, state[r][0], state[r][1], m.in[1]);
                put_row(gates + unit * G, a[r], m.in[1]);
                put_floats(l.gh + unit * G, hat[r], m.in[1]);
            }
        }
        { /* all bands have the same moments: each writes some */
            int number = number_of<COLUMNS>(m.lane), unit = m.unit + number % 2, to = (t * HIDDEN + unit) * G + number / 2;
            if (number / 2 < G && unit < HIDDEN) {
                if (m.band == 0) n.mean_h[to] = of_h.x;
                if (m.band == 1 % BANDS) n.var_h[to] = of_h.y;
            }
            number = number_of<2>(m.lane), unit = m.unit + number, to = t * HIDDEN + unit;
            if (LSTM && unit < HIDDEN) {
                if (m.band == 2 % BANDS) n.mean_c[to] = of_c.x;
                if (m.band == 3 % BANDS) n.var_c[to] = of_c.y;
            }
        }
    }
}
#endif

/* --- backwards -------------------------------------------------------------------------------------- */
#if BACK
struct Fetched { /* what a step needs that was there before */
    LateRow gates;
    LateFloats hat;
    LateTwo dy, old_h;
    Late held[2];
    float2 old_c, dcells;
    bool first, cut;
};
struct Moments {
    LateFloats var_h;
    float2 mean_c, var_c;
};

/* What a block has sent for a unit of a row. */
__device__ __forceinline__ float sum_of(const Slot &v, int r, int u) {
#if !SENT
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

/* Take the mean over all rows that are alive out of two columns. */
__device__ __forceinline__ void centre(float (&v)[2][2], const bool (&alive)[2], float share, float2 *sums, const Mine &m) {
    float both[2];
    EACH_UNIT both[u] = (alive[0] ? v[0][u] : 0.0f) + (alive[1] ? v[1][u] : 0.0f);
    sums[threadIdx.x].x = over_rows<2>(both, m.lane);
    __syncthreads();
    float mean = 0.0f;
    EACH_OF(BANDS) mean += sums[(m.part * BANDS + i) * 32 + m.lane].x;
    EACH_UNIT {
        float own = from_number<2>(mean * share, u, m.lane);
        EACH_ROW v[r][u] -= own;
    }
}

/* The derivatives of a thread's units and rows times all of W_h, to the blocks that have the columns. */
__device__ __forceinline__ void send_product(Shared &shared, int turn, const float (&d)[2][2][4], const Weights &w,
                                             const Mine &m) {
    u32 a[KS][4];
    float by = 1.0f;
#if SCALED
    u32 top = 0;
    EACH_ROW EACH_UNIT EACH_GATE top = max(top, size_of(d[r][u][q]));
    top = largest_of(top);
    const int scale = min(scale_for(top) - 6, 100), all = scale + w.scale; /* at most 2^9: 32 times 2 times that is below 2^16 */
    by = two_to(scale);
    send_undo(turn, top >= 0x7F800000 || all < -126 ? __uint_as_float(0x7FC00000) : two_to(-all), m);
#endif
#pragma unroll
    for (int k = 0; k < KP; k++) {
        EACH_OF(4) {
            const int r = i % 2, n = (k * 2 + i / 2) * EACH; /* the first number of the word */
            float low = n < 2 * GE ? d[r][n / GE % 2][n % GE] * by : 0.0f;
            float high = n + 1 < 2 * GE ? d[r][(n + 1) / GE % 2][(n + 1) % GE] * by : 0.0f;
#if SENT
            a[k][i] = pair_as<SENT>(low, high);
#else
            a[k][i] = bits(low);
#endif
        }
        if (PARTS > 1) shared.lent[k * THREADS + threadIdx.x] = make_uint4(a[k][0], a[k][1], a[k][2], a[k][3]);
    }
    if (PARTS > 1) {
        __syncthreads();
#pragma unroll
        for (int s = 0; s < KS; s++) {
            uint4 v = shared.lent[s % KP * THREADS + (s / KP * BANDS + m.band) * 32 + m.lane];
            a[s][0] = v.x, a[s][1] = v.y, a[s][2] = v.z, a[s][3] = v.w;
        }
    }
#pragma unroll
    for (int tile = 0; tile < BLOCKS; tile++) {
        float sum[4] = {};
#pragma unroll
        for (int s = 0; s < KS; s++) add_step(sum, a[s], w, s, tile);
#if !SENT
        Slot slot = make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                               __float_as_uint(sum[3]));
#else
        constexpr int kind = SCALED ? 2 : 1; /* without a scale they may be large or small */
        Slot slot = make_uint2(pair_as<kind>(sum[0], sum[1]), pair_as<kind>(sum[2], sum[3]));
#endif
        send(turn, slot, block_at(tile), m);
    }
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    backward(const Loop given, const Norm n) {
    Shared &shared = here();
    Loop l = given;
    simplify(l);
    const Mine m = mine(l);
    const narrow *gates = (const narrow *)l.gates;
    const bool holds = l.update.mode && l.update.hold;
    Weights w;
    load_weights(l, w, m);
    const Seeds seeds = seeds_of(l);
    Noises noises[2] = {};
    float scale_h[2][G] = {}, scale_c[2] = {}, shift_c[2] = {}, bias[2] = {}; /* the bias: of the n part of a GRU */
    EACH_UNIT if (m.in[u]) {
        noises[u] = noises_of(l, m.unit + u);
        EACH_GATE scale_h[u][q] = n.scale_h[(m.unit + u) * G + q];
        if (LSTM) scale_c[u] = n.scale_c[m.unit + u], shift_c[u] = n.shift_c[m.unit + u];
        if (GRU && l.b_h) bias[u] = widen(((const narrow *)l.b_h)[(m.unit + u) * G + 2]);
    }

    float dh[2][2] = {}, dc[2][2] = {}, back_h[2][2] = {}, back_c[2][2] = {}, owed[2][2] = {}, enters[2][2] = {};
    float dscale[2] = {}, dshift[2] = {}; /* of the norm of c */
    float db_x[COLUMNS] = {}, db_h[COLUMNS] = {}; /* of the biases: added up before they are rounded, since they nearly cancel */
    Fetched f[2] = {};
    Moments of = {};
    bool cut[2] = {}; /* whether the step after was cut off from this one */
    int at[2]; /* row of this step; at · G · H stays below 2³¹ */
    const int forth = l.reverse ? -(int)l.batch : (int)l.batch;
    u32 kept = 0;
    float share = 0.0f, share_after = 0.0f; /* of a row among those of this step, and of the one after */
    /* What step t needs beside the sums. */
    auto prepare = [&](int t) {
        EACH_ROW if (THERE(t)) {
            int unit = at[r] * HIDDEN + m.unit, old = unit - forth * HIDDEN;
            i64 start = (i64)m.row[r] * HIDDEN + m.unit;
            f[r].cut = cut_at(l, t, m.row[r], m.length[r]), f[r].first = t == 0 || f[r].cut;
            f[r].gates = late_row(gates + unit * G, m.in[1]);
            f[r].dy = late_two((const narrow *)l.dy + unit, m.in[1]);
            f[r].hat = late_floats(l.gh + unit * G, m.in[1]);
            if (LSTM) {
                f[r].old_c = two_at(f[r].first ? (f[r].cut ? l.reset_c : l.c0) + start : l.c + old, m.in[1]);
                if (l.dcells) f[r].dcells = two_at(l.dcells + unit, m.in[1]);
                if (holds && !f[r].first)
                    EACH_UNIT f[r].held[u] = m.in[u] ? late(gates + (old + u) * G + G - 1) : Late{0};
            }
            if (GRU) {
                const void *from = f[r].first ? (f[r].cut ? l.reset_h : l.h0) : l.y;
                f[r].old_h = late_two((const narrow *)from + (f[r].first ? start : old), m.in[1]);
            }
        }
        if (m.in[0]) {
            of.var_h = late_floats(n.var_h + (t * HIDDEN + m.unit) * G, m.in[1]);
            if (LSTM) {
                of.mean_c = two_at(n.mean_c + t * HIDDEN + m.unit, m.in[1]);
                of.var_c = two_at(n.var_c + t * HIDDEN + m.unit, m.in[1]);
            }
        }
        bring(l, gates, G * HIDDEN * sizeof(narrow), t - AHEAD);
        bring(l, l.gh, G * HIDDEN * sizeof(float), t - AHEAD);
        bring(l, l.dy, HIDDEN * sizeof(narrow), t - AHEAD);
        if (LSTM) bring(l, l.c, HIDDEN * sizeof(float), t - AHEAD);
        if (GRU) bring(l, l.y, HIDDEN * sizeof(narrow), t - AHEAD);
        kept = draw(l, m, seeds, noises, t);
        if (l.lengths) share = counts_at(l, m, t).share;
    };
    /* What has come back through the product to step t. Its sum over the rows is zero but for rounding: see Loop.balanced. */
    auto receive = [&](int t) {
        const int turns = (int)l.steps - 2 - t, turn = turns & 1;
        await_turn(turn, turns >> 1 & 1, m);
        expect(turn, m);
        float rec[2][2];
        EACH_OF(BLOCKS) {
            Slot v = shared.sent[turn][i * THREADS + threadIdx.x];
            EACH_ROW EACH_UNIT {
                float part = sum_of(v, r, u) * (SCALED ? shared.undo[turn][SCALED ? m.warp : 0][i] : 1.0f);
                rec[r][u] = i ? rec[r][u] + part : part;
            }
        }
        bool alive[2];
        EACH_ROW alive[r] = ALIVE(t + 1);
        centre(rec, alive, share_after, shared.sums[2], m);
        EACH_ROW EACH_UNIT if (alive[r]) {
            dh[r][u] += l.scale_h ? rec[r][u] * enters[r][u] : rec[r][u];
            if (cut[r]) back_h[r][u] += dh[r][u], back_c[r][u] += dc[r][u], dh[r][u] = dc[r][u] = 0.0f;
        }
    };
    EACH_ROW {
        at[r] = (int)at_of(l, l.steps - 1, m.row[r], m.length[r]);
        EACH_UNIT if (m.in[u] && m.row[r] < l.batch) {
            i64 start = (i64)m.row[r] * HIDDEN + m.unit + u;
            dh[r][u] = l.dh[start];
            if (LSTM) dc[r][u] = l.dc[start];
            if (l.scale_h) enters[r][u] = widen(((const narrow *)l.scale_h)[start]);
        }
    }
    begin(m);
    share = counts_at(l, m, 0).share;
    prepare((int)l.steps - 1);

    for (int t = (int)l.steps - 1; t >= 0; t--) {
        bool alive[2];
        float d[2][2][4] = {}, e[2][2][4] = {}, out[2][2][4] = {}; /* of x's part, of h·Wh with norm and bias, and of h·Wh */
        float rstd[COLUMNS] = {}, du[2][2] = {}, shown[2][2] = {}, hat_c[2][2] = {}; /* shown: the derivative of c as shown */
        Keep keep[2][2];
        EACH_GATE EACH_UNIT rstd[q * 2 + u] = inverse(of.var_h.at(u, q), n.eps);
        EACH_ROW EACH_UNIT alive[r] = ALIVE(t), keep[r][u] = keep_at(l, kept, noises[u], r, u);
#if LSTM
        /* Before the sums are there: c as it was shown, and how h follows it. */
        float rstd_c[2], of_c[2][2], tc[2][2] = {}, slope[2][2] = {};
        EACH_UNIT rstd_c[u] = inverse(of_two(of.var_c, u), n.eps);
        EACH_ROW EACH_UNIT if (alive[r]) {
            float gate = widen(f[r].gates, u, 3);
            float shows = lstm_candidate(l, widen(f[r].gates, u, 0), widen(f[r].gates, u, 1), widen(f[r].gates, u, 2),
                                         of_two(f[r].old_c, u), keep[r][u]);
            hat_c[r][u] = (shows - of_two(of.mean_c, u)) * rstd_c[u];
            tc[r][u] = tanh_at(hat_c[r][u] * scale_c[u] + shift_c[u]);
            if (holds && !f[r].first) gate = mix(gate, widen(f[r].held[u]), keep[r][u].update);
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
            d[r][u][3] = lstm_output_back(l, du[r][u] * tc[r][u], widen(f[r].gates, u, 3), f[r].first, owed[r][u], keep[r][u]);
            shown[r][u] = du[r][u] * slope[r][u];
        }
        EACH_ROW EACH_UNIT of_c[r][u] = shown[r][u] * scale_c[u];
        moments_back<2>(of_c, hat_c, rstd_c, alive, share, shared.sums[1], m);
        EACH_ROW EACH_UNIT if (alive[r]) {
            dc[r][u] += of_two(f[r].dcells, u);
            lstm_gates_back(l, d[r][u], widen(f[r].gates, u, 0), widen(f[r].gates, u, 1), widen(f[r].gates, u, 2),
                            of_two(f[r].old_c, u), of_c[r][u], dc[r][u], keep[r][u]);
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
            float of_h[2][COLUMNS] = {}, hat[2][COLUMNS] = {};
            EACH_ROW EACH_GATE EACH_UNIT {
                of_h[r][q * 2 + u] = (GRU ? e[r][u][q] : d[r][u][q]) * scale_h[u][q];
                hat[r][q * 2 + u] = f[r].hat.at(u, q);
            }
            moments_back<COLUMNS>(of_h, hat, rstd, alive, share, shared.sums[LSTM ? 0 : t & 1], m);
            EACH_ROW EACH_UNIT EACH_GATE out[r][u][q] = of_h[r][q * 2 + u]; /* a row that has ended stays alone */
        }
        send_product(shared, (int)l.steps - 1 - t & 1, out, w, m);
        /* Until all have sent: what the next step needs, and results. */
        const int here_at[2] = {at[0], at[1]};
        EACH_ROW at[r] -= forth, cut[r] = ALIVE(t) && f[r].cut;
        share_after = share;
        if (t > 0) prepare(t - 1);
        EACH_ROW {
            if (THERE(t)) {
                int gate = (here_at[r] * HIDDEN + m.unit) * G;
                put_row((narrow *)l.dgx + gate, d[r], m.in[1]);
                if (GRU) put_row((narrow *)l.dsh + gate, e[r], m.in[1]);
                put_row((narrow *)n.dgh + gate, out[r], m.in[1]);
            }
            EACH_UNIT {
                dscale[u] += shown[r][u] * hat_c[r][u], dshift[u] += shown[r][u];
                EACH_GATE db_x[q * 2 + u] += d[r][u][q], db_h[q * 2 + u] += e[r][u][q];
            }
        }
    }
    receive(-1);
    auto of_all = [&](float first, float second) { /* two sums of a lane's number, of all bands */
        float2 all = make_float2(0.0f, 0.0f);
        __syncthreads(); /* all have read the sums before */
        shared.sums[0][threadIdx.x] = make_float2(first, second);
        __syncthreads();
        EACH_OF(BANDS) {
            float2 band = shared.sums[0][(m.part * BANDS + i) * 32 + m.lane];
            all.x += band.x, all.y += band.y;
        }
        return all;
    };
    if (LSTM) {
        const float2 all = of_all(over_rows<2>(dscale, m.lane), over_rows<2>(dshift, m.lane));
        const int unit = m.unit + number_of<2>(m.lane);
        if (m.band == 0 && unit < HIDDEN) n.dscale_c[unit] = all.x, n.dshift_c[unit] = all.y;
    }
    {
        const float2 all = of_all(over_rows<COLUMNS>(db_x, m.lane), over_rows<COLUMNS>(db_h, m.lane));
        const int number = number_of<COLUMNS>(m.lane), unit = m.unit + number % 2, to = unit * G + number / 2;
        if (m.band == 0 && number / 2 < G && unit < HIDDEN) {
            n.db_x[to] = all.x;
            if (GRU) n.db_h[to] = all.y;
        }
    }
    EACH_ROW EACH_UNIT if (m.in[u] && m.row[r] < l.batch) {
        i64 start = (i64)m.row[r] * HIDDEN + m.unit + u;
        l.dh[start] = dh[r][u];
        if (LSTM) l.dc[start] = dc[r][u];
        if (l.resets) {
            l.dreset_h[start] = back_h[r][u];
            if (LSTM) l.dreset_c[start] = back_c[r][u];
        }
    }
}
#endif
