/* All steps in one launch: every block keeps its part of W_h on the chip and owns U units of R rows over all time.
 *
 * Compiled with BACK (0 forwards, 1 backwards), U (units a block, a multiple of 4), UP (U rounded up to 8, 16 or 32), KS
 * (k-steps of a warp, even), KR (of which so many have their weights in registers, the others in shared memory), BB (pairs
 * of k-steps of a batch), D (batches in flight on the way to shared memory), MT (16 rows each), EIGHTS (of rows, read),
 * PARTS (sets of sums that take turns), HALF (what enters the product is float, with the ten bits of TF32, but goes in half
 * precision, which has as many), FOLD and MAKERS (below) and HAS. Each of 8 warps has its own part of the depth of the product;
 * the eight sums are added in a fixed order. Forwards h goes around, backwards the derivatives of h·Wh, [unit][gate].
 *
 * Derivatives may be of any size, and half precision may not. So (SCALED) each block sends those of a row times a power of
 * two of its own, which brings the largest of them near the largest of half precision, and beside them the factor that undoes
 * it. FOLD k-steps at a time are all of one block: their sums are taken by themselves and then added times the factor. What a
 * warp reads comes from MAKERS blocks at most. W_h has one such power of two.
 *
 * There are no flags and no fences: the lowest bit of every 8 bytes that go around tells whether they are of this turn. Two
 * buffers take turns, and the bit is turned over each time one is used again. A block that has read all of step t - 1
 * knows that everybody has read step t - 2, so it may write step t in its place. Whoever reads too early reads again.
 * The factors have the bit in each of them, lie in the same two buffers and are read before anything of the next step is
 * sent, so all of this holds for them too.
 */
#define WARPS 8
#define THREADS (32 * WARPS)
#define R (16 * MT)
#define SENT (HALF ? 2 : TYPE) /* the type of what enters the product */
#define KE (SENT ? 16 : 8) /* numbers of a k-step: always 32 bytes */
#define KW (KS * KE)
#define GE (!BACK || G == 1 ? 1 : G <= 4 ? 4 : 8) /* numbers of a unit in what goes around */
#define COLUMNS (BACK ? U : U * G)
#define NT ((COLUMNS + 7) / 8)
#define NP (NT * 8 + (NT % 2 ? 0 : 8)) /* a stride that keeps the writes of the sums free of conflicts */
#define ROWS_AT_ONCE (THREADS / UP)
#define ITEMS ((R + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE)
#define SCALED (BACK && HALF)
/* Of sums, so that one product need not wait for the one before. Forwards one, whatever the tiles are: the bits of a row may
 * not depend on the size of its batch. */
#define SETS (BACK && !SCALED && MT * NT < 4 ? 2 : 1)
#define BATCHES ((KS / 2 + BB - 1) / BB)
#define PIECES (BB * MT * 2) /* of 16 bytes that a thread copies of a batch, at most */
#define EACH (SENT ? 8 : 4)  /* numbers of a piece */
#define NUMBERS (WARPS * KS * R * 32) /* bytes that go around in a group */
#define FACTORS (MAKERS * EIGHTS * 32) /* bytes of the factors that a warp reads: [MAKERS][EIGHTS · 8] floats */
#define FACTOR_PIECES ((FACTORS / 16 + 31) / 32) /* of them that a thread copies, at most */

struct Exchange {
    char *buffer; /* [2][groups], zero: [pairs of k-steps][R / 8][8 rows][4 pieces][16 bytes], then the factors of all blocks */
    i64 size;     /* bytes of a group in it */
    i64 blocks;   /* of a group */
    const float *peak; /* SCALED: the largest |W_h| */
};

/* --- what enters the product ---------------------------------------------------------------------- */

/* HALF: the largest numbers become the largest of half precision; NaN stays. SCALED ones are none too large. */
__device__ __forceinline__ float within(float v) {
    return !HALF || SCALED ? v : v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
}
#if SENT
__device__ __forceinline__ u32 pair_sent(float low, float high) { return pair_as<SENT>(within(low), within(high)); }
__device__ __forceinline__ float widen_sent(u32 v) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"((u16)v));
    return SENT == 1 ? __uint_as_float(v << 16) : out;
}
#endif

#if SCALED
struct Scale { /* of W_h: that brings its largest to between 2^14 and 2^15 */
    float by;    /* NaN where it is not finite, so that all becomes NaN */
    int sent;    /* the exponent that the factors undo … */
    float after; /* … and what they could not: W_h beyond 2^15, which has to be taken back last */
};

__device__ __forceinline__ Scale scale_of(const float *peak) {
    u32 top = __float_as_uint(*peak);
    int e = min(scale_for(top), 126);
    return {top >= 0x7F800000 ? __uint_as_float(0x7FC00000) : two_to(e), max(e, 0), two_to(max(-e, 0))};
}
#endif

/* --- weights -------------------------------------------------------------------------------------- */

/* The weight between number k of what goes around and column n of the block. */
__device__ __forceinline__ narrow weight(const Loop &l, u32 unit0, u32 k, u32 n) {
    const u32 H = (u32)l.hidden, own = unit0 + (BACK ? n : n / G), other = BACK ? k / GE : k, gate = BACK ? k % GE : n % G;
    if (n >= COLUMNS || own >= H || other >= H || gate >= G) return 0;
    return ((const narrow *)l.w_hh)[((i64)gate * H + (BACK ? other : own)) * H + (BACK ? own : other)];
}

/* Word `word` of a 16-byte piece; HALF: times `by`. */
__device__ __forceinline__ u32 weights_of(const Loop &l, float by, u32 unit0, u32 piece, u32 word, u32 n) {
#if SENT
    u32 k = piece * 8 + word * 2;
    narrow low = weight(l, unit0, k, n), high = weight(l, unit0, k + 1, n);
#if HALF
    return pair_sent(low * by, high * by);
#else
    return (u32)low | (u32)high << 16;
#endif
#else
    return bits(weight(l, unit0, piece * 4 + word, n));
#endif
}

struct Weights { /* of a thread */
    u32 own[KR][NT][2];
    u32 rest; /* its place in shared memory: [KS - KR][NT][32 lanes][8 bytes] */
};

__device__ __forceinline__ void load_weights(const Loop &l, float by, Weights &w, u32 unit0, u32 warp, u32 lane,
                                             uint2 *rest) {
    auto at = [&](int s, int n, int half) { /* of k-step s and eight columns */
        return weights_of(l, by, unit0, (warp * KS + s) * 2 + half, lane % 4, n * 8 + lane / 4);
    };
#pragma unroll
    for (int s = 0; s < KR; s++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) w.own[s][n][half] = at(s, n, half);
    rest += warp * ((KS - KR) * NT * 32) + lane;
    w.rest = (u32)__cvta_generic_to_shared(rest);
    for (int s = KR; s < KS; s++)
        for (int n = 0; n < NT; n++) rest[((s - KR) * NT + n) * 32] = make_uint2(at(s, n, 0), at(s, n, 1));
}

__device__ __forceinline__ uint2 weights_at(const Weights &w, int s, int n) {
    if (s < KR) return make_uint2(w.own[s < KR ? s : 0][n][0], w.own[s < KR ? s : 0][n][1]);
    uint2 out;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(out.x), "=r"(out.y) : "r"(w.rest + ((s - KR) * NT + n) * 256));
    return out;
}

/* --- the product ---------------------------------------------------------------------------------- */

/* What a warp reads, through shared memory: [D · PIECES][8 rows][4 pieces][16 bytes], of each pair of k-steps 512 bytes for
 * eight rows. The pieces of a row are turned around so that no two of a tile lie in the same banks. Whatever there is a place
 * for is sent, so that all of it can be read and none has to be left out. */
struct Reads {
    u32 to, at[2];    /* where a thread copies to, and where it reads a row of a tile for the two k-steps of a pair */
    u32 checks;       /* one where what it reads of a tile has the bits that tell the turn */
    const char *from; /* in the first buffer */
    const char *hint; /* a word of one of the blocks that make what the warp reads, in the first buffer, or NULL */
    /* SCALED: */
    int factors;        /* where those of the warp are, from `from` */
    int pieces;         /* how many of them it has to copy from its own on: those of blocks that there are */
    u32 factors_to, by; /* where it copies them to, and where it reads that of its row of a tile */
    u32 skew;           /* k-steps of the first block that another warp has */
};

#define EACH_PAIR(batch) _Pragma("unroll") for (int b = 0; b < BB; b++) if ((batch) * BB + b < KS / 2)
#define EACH_TILE _Pragma("unroll") for (int s = 0; s < 2; s++) _Pragma("unroll") for (int m = 0; m < MT; m++)
#define STAGE(batch, eight) ((((batch) % D) * PIECES + b * MT * 2 + (eight)) * 512)

/* Wait until every block that makes what the warp reads has sent something of this turn: then most of it is there, and
 * it is read only once. Reading all of it again and again would keep the last ones from writing. */
__device__ __forceinline__ void await(const Reads &x, i64 buffer, u32 tag) {
    u32 v = tag;
    do {
        if (x.hint) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(x.hint + buffer) : "memory");
    } while (__any_sync(~0u, (v ^ tag) & 1));
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Until but LEFT of what was copied is there for all lanes. */
template <int LEFT>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
    __syncwarp();
}

/* The factors come with the first batch. */
#define EACH_FACTOR_PIECE(batch) \
    _Pragma("unroll") for (int i = 0; SCALED && (batch) == 0 && i < FACTOR_PIECES; i++) if (i * 32 < x.pieces)

__device__ __forceinline__ void copy_batch(const Reads &x, const char *from, int batch) {
    EACH_FACTOR_PIECE(batch)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(x.factors_to + i * 512),
                     "l"(from + x.factors + i * 512) : "memory");
    EACH_PAIR(batch)
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(x.to + STAGE(batch, eight)),
                     "l"(from + ((batch * BB + b) * (R / 8) + eight) * 512) : "memory");
    commit();
}

/* The same where a batch lay before: once every lane has read it. */
__device__ __forceinline__ void copy_over(const Reads &x, const char *from, int batch) {
    __syncwarp();
    copy_batch(x, from, batch);
}

/* wrong |= v ^ tag, in one instruction: left alone, the compiler takes the bit that counts out of each and goes on with that. */
__device__ __forceinline__ void differ(u32 &wrong, u32 v, u32 tag) {
    asm("lop3.b32 %0, %0, %1, %2, 0xF6;" : "+r"(wrong) : "r"(v), "r"(tag));
}

/* The tiles of a batch; copied again until all of it is of this turn. */
__device__ __forceinline__ void take_batch(u32 (&v)[BB][2][MT][4], const Reads &x, const char *from, int batch, u32 tag) {
    for (;;) {
        u32 wrong = 0, also = 0, factors = 0;
        EACH_PAIR(batch) EACH_TILE {
            u32 *one = v[b][s][m];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(one[0]), "=r"(one[1]), "=r"(one[2]), "=r"(one[3])
                         : "r"(x.at[s] + STAGE(batch, m * 2))
                         : "memory");
        }
        EACH_PAIR(batch) EACH_TILE {
            u32 *one = v[b][s][m];
            if (m * 2 < EIGHTS) differ(wrong, one[0], tag), differ(also, one[2], tag);
            if (m * 2 + 1 < EIGHTS) differ(wrong, one[1], tag), differ(also, one[3], tag);
        }
        EACH_FACTOR_PIECE(batch) {
            u32 one[4];
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(one[0]), "=r"(one[1]), "=r"(one[2]), "=r"(one[3]) : "r"(x.factors_to + i * 512) : "memory");
#pragma unroll
            for (int n = 0; n < 4; n++) differ(factors, one[n], tag);
        }
        if (!__any_sync(~0u, ((wrong | also) & x.checks) | (factors & 1))) break;
        copy_over(x, from, batch);
        wait<0>();
    }
}

/* SCALED: the sums of fold f, of one tile, are added to all. */
__device__ __forceinline__ void add_fold(float (&sum)[NT][4], const float (&part)[NT][4], const Reads &x, int f, int m) {
    const u32 maker = (x.skew + f * FOLD) / (U / 4);
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
        if (m * 2 + eight >= EIGHTS) continue; /* nobody reads these rows */
        float factor;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(factor) : "r"(x.by + maker * (EIGHTS * 32) + (m * 2 + eight) * 32));
#pragma unroll
        for (int n = 0; n < NT; n++) {
            sum[n][eight * 2] = fmaf(part[n][eight * 2], factor, sum[n][eight * 2]);
            sum[n][eight * 2 + 1] = fmaf(part[n][eight * 2 + 1], factor, sum[n][eight * 2 + 1]);
        }
    }
}

/* What has gone around, times the block's weights: each warp's sums over its part of the depth go to `part`. */
__device__ __forceinline__ void product(const Weights &w, float *part, const Reads &x, i64 buffer, u32 tag,
                                        int warp, int lane) {
    float sum[SETS][MT][NT][4] = {}, part_of[2][MT][NT][4]; /* part_of: of a fold; added when the next has begun */
    const char *from = x.from + buffer;
    await(x, buffer, tag);
#pragma unroll
    for (int i = 0; i < D; i++) copy_batch(x, from, i);
#pragma unroll
    for (int i = 0; i < BATCHES; i++) {
        u32 v[BB][2][MT][4];
        wait<D - 1>();
        take_batch(v, x, from, i, tag);
        if (i + D < BATCHES)
            copy_over(x, from, i + D);
        else
            commit();
        EACH_PAIR(i) EACH_TILE {
            const int k = (i * BB + b) * 2 + s, f = k / FOLD;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint2 one = weights_at(w, k, n);
                float *to = SCALED ? part_of[f % 2][m][n] : sum[s % SETS][m][n];
                if (SCALED && k % FOLD == 0) to[0] = to[1] = to[2] = to[3] = 0.0f;
                multiply_as<SENT>(to, v[b][s][m], one.x, one.y);
            }
            if (SCALED && k % FOLD == 0 && f > 0) add_fold(sum[0][m], part_of[(f + 1) % 2][m], x, f - 1, m);
        }
    }
#pragma unroll
    for (int m = 0; SCALED && m < MT; m++) add_fold(sum[0][m], part_of[(KS / FOLD + 1) % 2][m], x, KS / FOLD - 1, m);
    if (PARTS == 1) __syncthreads(); /* all have read those of the step before */
    part += warp * (R * NP) + (lane / 4) * NP + (lane % 4) * 2;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float *v = sum[0][m][n];
#pragma unroll
            for (int i = 0; SETS > 1 && i < 4; i++) v[i] += sum[SETS - 1][m][n][i];
            *(float2 *)(part + m * 16 * NP + n * 8) = make_float2(v[0], v[1]);
            *(float2 *)(part + (m * 16 + 8) * NP + n * 8) = make_float2(v[2], v[3]);
        }
}

/* The eight sums of COUNT neighbouring columns. */
template <int COUNT>
__device__ __forceinline__ void total(float *v, const float *part) {
#pragma unroll
    for (int q = 0; q < COUNT; q++) v[q] = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        if (COUNT == 4) {
            float4 one = *(const float4 *)(part + w * (R * NP));
            v[0] += one.x, v[1 % COUNT] += one.y, v[2 % COUNT] += one.z, v[3 % COUNT] += one.w;
        } else {
#pragma unroll
            for (int q = 0; q < COUNT; q++) v[q] += part[w * (R * NP) + q];
        }
    }
}

/* --- what goes around ----------------------------------------------------------------------------- */

struct Mine { /* what a thread has to do */
    int warp, lane, u;
    i64 unit0, unit, row0, H, other; /* other: bytes from one buffer to the other */
    bool in, sends;                  /* whether its unit is one of the layer's, and whether there is a place for it */
    float *part;
    uint2 *weights; /* those of all warps that are not in registers */
    Reads reads;
    char *own, *to; /* the first buffer of the group, and where its unit begins in it */
    i64 end;        /* of the numbers that the blocks have */
    int rest;       /* words of 8 bytes after it, in all rows, that the block has to send */
    char *factor;   /* SCALED: where its own factors begin in the first buffer */
};

/* Where number k and row r are: so that a warp reads 512 bytes at a time, each thread the numbers of its own tile. */
__device__ __forceinline__ i64 place_of(i64 k) {
    return (k / (4 * EACH) * (R / 8) * 32 + k / EACH % 4) * 16 + k % EACH * (16 / EACH);
}
__device__ __forceinline__ int row_at(int r) { return (r / 8 * 32 + r % 8 * 4) * 16; }

/* Turn `turn` of what goes around: which buffer, and the bit that says so. */
__device__ __forceinline__ i64 buffer_of(const Mine &m, i64 turn) { return (turn & 1) * m.other; }
__device__ __forceinline__ u32 tag_of(i64 turn) { return (u32)(turn >> 1 & 1) ^ 1; }

#if SENT
/* Two numbers side by side, the first of them being the nearest one whose lowest bit is `tag`. */
__device__ __forceinline__ u32 tagged_pair(float low, float high, u32 tag) {
    low = within(low);
    u32 both = pair_sent(low, high), x = both & 0xFFFF;
    if ((x ^ tag) & 1) x += fabsf(low) > fabsf(widen_sent(x)) || !(x & 0x7FFF) ? 1 : -1;
    return (both & 0xFFFF0000) | (x & 0xFFFF);
}
#else
__device__ __forceinline__ u32 tagged(float v, u32 tag) { return (bits(v) & ~1u) | tag; } /* far below what enters */
#endif

__device__ __forceinline__ void write8(char *to, u32 low, u32 high) {
    asm volatile("{ .reg .b64 both; mov.b64 both, {%1, %2}; st.relaxed.gpu.global.u64 [%0], both; }"
                 ::"l"(to), "r"(low), "r"(high) : "memory");
}

/* Send the numbers of one unit of one row, [GE], zeros for what is not there; all lanes of a warp must come here. Where
 * units have one number each, four (two of 32 bits) share 8 bytes, and the first of them sends. */
__device__ __forceinline__ void send(const Mine &m, i64 turn, int r, const float *v) {
    char *to = m.to + buffer_of(m, turn) + row_at(r);
    const u32 tag = tag_of(turn);
    const bool in = m.sends && r < R;
#if SENT
    if (GE == 1) {
        u32 one = m.u % 4 ? pair_sent(v[0], 0.0f) : tagged_pair(v[0], 0.0f, tag);
        u32 two = one | __shfl_down_sync(~0u, one, 1) << 16, more = __shfl_down_sync(~0u, two, 2);
        if (in && m.u % 4 == 0) write8(to, two, more);
    } else if (in) {
#pragma unroll
        for (int q = 0; q < GE; q += 4)
            write8(to + q * 2, tagged_pair(v[q], v[(q + 1) % GE], tag), pair_sent(v[(q + 2) % GE], v[(q + 3) % GE]));
    }
#else
    if (GE == 1) {
        u32 beside = __shfl_down_sync(~0u, bits(v[0]), 1);
        if (in && m.u % 2 == 0) write8(to, tagged(v[0], tag), beside);
    } else if (in) {
#pragma unroll
        for (int q = 0; q < GE; q += 2) write8(to + q * 4, tagged(v[q], tag), bits(v[(q + 1) % GE]));
    }
#endif
}

#if SCALED
/* The numbers of a row times a power of two that brings the largest, of all units of the block, to between 2^14 and 2^15; and
 * what undoes this and the scale of W_h, to those who read. All lanes of a warp must come here. A row with a number that is
 * not finite has the factor NaN; one of zeros has zero, so that the bit of the turn adds nothing. */
__device__ __forceinline__ void scale_rows(const Mine &m, const Scale &s, i64 turn, float (&v)[ITEMS][GE]) {
    u32 top[ITEMS] = {};
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        for (int q = 0; q < G; q++) top[i] = max(top[i], size_of(v[i][q]));
#pragma unroll
    for (int own = 0; own < 32 / UP; own++) /* of the rows that a warp has */
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            u32 most = largest_of(m.lane / UP == own ? top[i] : 0);
            if (m.lane / UP == own) top[i] = most;
        }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int r = threadIdx.x / UP + i * ROWS_AT_ONCE, e = min(scale_for(top[i]), 126 - s.sent);
        for (int q = 0; q < G; q++) v[i][q] *= two_to(e);
        u32 factor = top[i] >= 0x7F800000 ? 0x7FC00000 : top[i] ? __float_as_uint(two_to(-e - s.sent)) : 0;
        if (m.u == 0 && r < EIGHTS * 8)
            asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(m.factor + buffer_of(m, turn) + r * 4),
                         "r"(factor | tag_of(turn)) : "memory");
    }
}
#endif

/* What comes after the last unit is read as well: the last block keeps it at zero, of this turn. */
__device__ __forceinline__ void send_rest(const Mine &m, i64 turn) {
    for (int i = threadIdx.x; i < m.rest; i += THREADS)
        write8(m.own + buffer_of(m, turn) + place_of(m.end + i / R * (EACH / 2)) + row_at(i % R), tag_of(turn), 0);
}

__device__ __forceinline__ Mine mine(const Loop &l, const Exchange &x) {
    extern __shared__ __align__(16) char shared[];
    Mine m;
    int groups = gridDim.x / (int)x.blocks, group = blockIdx.x / (int)x.blocks, block = blockIdx.x % (int)x.blocks;
    m.warp = threadIdx.x / 32, m.lane = threadIdx.x % 32, m.u = threadIdx.x % UP;
    m.H = l.hidden, m.unit0 = (i64)block * U, m.unit = m.unit0 + m.u, m.row0 = (i64)group * R;
    m.in = m.u < U && m.unit < m.H, m.sends = m.u < U && m.unit * GE < WARPS * KW;
    m.part = (float *)shared;
    m.weights = (uint2 *)(shared + PARTS * WARPS * R * NP * 4);
    char *stages = (char *)(m.weights + WARPS * (KS - KR) * NT * 32);
    for (int i = threadIdx.x; i < WARPS * (D * PIECES * 128 + FACTORS / 4); i += THREADS) ((u32 *)stages)[i] = 0;
    u32 stage = (u32)__cvta_generic_to_shared(stages) + m.warp * (D * PIECES * 512);
    auto piece = [](int row, int k) { return (row * 4 + (k ^ (row >> 1 & 3))) * 16; };
    m.reads.to = stage + piece(m.lane / 4, m.lane % 4);
    for (int s = 0; s < 2; s++) m.reads.at[s] = stage + m.lane / 8 % 2 * 512 + piece(m.lane % 8, s * 2 + m.lane / 16);
    m.reads.checks = ~m.lane & 1;
    const i64 size = SCALED ? x.size : (i64)NUMBERS; /* known where there are no factors */
    m.other = groups * size;
    char *own = m.own = x.buffer + group * size;
    m.end = x.blocks * U * GE;
    m.rest = block + 1 < x.blocks ? 0 : (int)(WARPS * KW - m.end) / (EACH / 2) * R;
    m.reads.from = own + (m.warp * (KS / 2) * (R / 8) * 32 + m.lane) * 16;
    i64 maker = m.warp * KW / GE / U + m.lane, at = maker * U * GE; /* one of the blocks that it waits for */
    m.reads.hint = maker < x.blocks && at < (i64)(m.warp + 1) * KW
                       ? own + place_of(at) + row_at(R - 1) : nullptr;
    i64 k = m.unit * GE;
    m.to = own + place_of(k);
    if (SCALED) {
        const int first = m.warp * KS / (U / 4), there = min(MAKERS, (int)x.blocks - first) * EIGHTS * 2;
        const u32 factors = (u32)__cvta_generic_to_shared(stages) + WARPS * (D * PIECES * 512) + m.warp * FACTORS;
        m.factor = own + NUMBERS + block * (EIGHTS * 32);
        m.reads.factors = (int)(own + NUMBERS + first * (EIGHTS * 32) + m.lane * 16 - m.reads.from);
        m.reads.pieces = there - m.lane;
        m.reads.factors_to = factors + m.lane * 16;
        m.reads.by = factors + m.lane / 4 * 4;
        m.reads.skew = KS % (U / 4) ? m.warp * KS % (U / 4) : 0;
    }
    /* The compiler may not know where these come from, or it would find them out again for every piece. */
    asm volatile("" : "+r"(m.reads.to), "+r"(m.reads.at[0]), "+r"(m.reads.at[1]), "+l"(m.reads.from), "+l"(m.to));
    __syncthreads();
    return m;
}

#define EACH_ITEM                                                                        \
    _Pragma("unroll") for (int i = 0; i < ITEMS; i++)                                    \
        if (i64 r = threadIdx.x / UP + i * ROWS_AT_ONCE, row = m.row0 + r; m.in && r < R)
#define LENGTHS(length)                             \
    _Pragma("unroll") for (int i = 0; i < ITEMS; i++) { \
        i64 row = m.row0 + threadIdx.x / UP + i * ROWS_AT_ONCE; \
        length[i] = row < l.batch ? (int)length_of(l, row) : 0; \
    }
#define PART(t) (m.part + ((t) & (PARTS - 1)) * (WARPS * R * NP))

