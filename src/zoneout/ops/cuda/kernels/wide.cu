/* All steps forwards in one launch for many rows: an LSTM whose W_h is spread over the chip, multiplied by warpgroups.
 *
 * Compiled with KS (k-steps: of 16 units each, as many as a block owns, so also the blocks of a group), TURNS (of 64 rows each
 * that a block takes one after another), CK (k-steps of a chunk), STAGES (chunks on their way to shared memory) and KR (k-steps
 * of a warpgroup with their weights in registers, the others in shared memory; whole chunks). Only without anything that HAS
 * would name, and with the modes of both states: zoneout by unit, all rows to the last step.
 *
 * Two warpgroups take half of the k-steps each: the four gates of the block's 16 units for 64 rows. Other warps bring in h,
 * which lies as the products want it, [unit / 8][row][unit % 8], so that a chunk is one copy, and tell the other blocks, by a
 * number, how many turns this one has sent. Two buffers take turns: whoever has sent turn p has read all of p - 1, so that
 * p + 1 may take its place. While h of one half of the rows goes around, the other half is multiplied, and while the hardware
 * multiplies, masks are drawn and the results of the turn before are written.
 */
#define WARPS 8                    /* that multiply */
#define THREADS (32 * WARPS + 128) /* a third warpgroup, of which two warps do something: registers are shared out by warpgroups */
#define ROWS 64
#define OWNED 16                   /* units of a block */
#define CHUNKS ((KS + CK - 1) / CK)
#define OF_GROUP (CHUNKS * CK / 2) /* k-steps of a warpgroup: past the last they are zero */
#define STEP (ROWS * 32)           /* bytes of a k-step: of h, and of weights */
#define CHUNK (CK * STEP)
#define TILES (ROWS / 8 / 2)       /* of eight rows: those whose sums a warpgroup ends with */
#define ITEMS TILES                /* rows of a thread in a turn */
#define PIECES (4 * ROWS * 2)      /* of 16 bytes: the gates of a turn, [gate][row][unit / 8] */

struct Exchange {
    char *buffer; /* of each group [2][TURNS][CHUNKS][CHUNK], then u32 [TURNS][KS], all zero */
    i64 size;     /* bytes of a group in it */
    i64 blocks;   /* of a group */
    const float *peak;
};
#define BUFFER ((i64)TURNS * CHUNKS * CHUNK)

/* Shared memory, in bytes, after the weights that are not in registers: [warpgroup][k-step][depth / 8][column][depth % 8]. */
#define AT_STAGES (2 * (OF_GROUP - KR) * STEP)
#define AT_SUMS (AT_STAGES + STAGES * CHUNK)
#define AT_GATES (AT_SUMS + 2 * TILES * 128 * 16)      /* [TURNS][gate][row][unit]: x's part, then the gates */
#define AT_H (AT_GATES + TURNS * PIECES * 16)          /* [unit / 8][row][unit % 8] */
#define AT_EXAMPLES (AT_H + STEP)                      /* [TURNS][row] */
#define AT_BARRIERS (AT_EXAMPLES + TURNS * ROWS * 4)   /* of each stage: that it is full, that it is empty */

/* --- what the hardware does by itself --------------------------------------------------------------- */

/* A barrier in shared memory: so many arrivals, and as many bytes as were announced, end a phase. */
__device__ __forceinline__ void init_barrier(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void announce(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive_at(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
__device__ __forceinline__ void await(u32 at, u32 phase) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at), "r"(phase) : "memory");
    } while (!done);
}

/* Bytes from memory, which a barrier counts. What ordinary stores have written is ordered before such a copy by a fence alone. */
__device__ __forceinline__ void bring(u32 to, const char *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void between_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copied() {
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
}

/* Registers of a thread: the warpgroup that does not multiply gives most of its own away. */
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(40)); }
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(232)); }

/* Among the warps that multiply; and with that one which tells the others, for which they do not wait. */
__device__ __forceinline__ void meet() { asm volatile("bar.sync %0, %1;" ::"n"(1), "n"(32 * WARPS) : "memory"); }
__device__ __forceinline__ void sent(u32 turn) {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 + turn), "n"(32 * WARPS + 32) : "memory");
}
__device__ __forceinline__ void await_sent(u32 turn) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + turn), "n"(32 * WARPS + 32) : "memory");
}

/* A matrix in shared memory as a product takes it: eight rows of 16 bytes lie together, eights of rows 128 bytes apart, and
 * the next 8 numbers of the depth `far` bytes. */
__device__ __forceinline__ u64 matrix(u32 at, u32 far) {
    return (u64)((at & 0x3FFFF) >> 4) | (u64)(far >> 4) << 16 | (u64)(128 >> 4) << 32;
}

#define SUM8(n)                                                                                                    \
    "+f"(sum[n]), "+f"(sum[n + 1]), "+f"(sum[n + 2]), "+f"(sum[n + 3]), "+f"(sum[n + 4]), "+f"(sum[n + 5]), "+f"(sum[n + 6]), "+f"(sum[n + 7])
#define SUMS SUM8(0), SUM8(8), SUM8(16), SUM8(24)
#if TYPE == 1
#define HOW "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
#else
#define HOW "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
#endif
#define OUT                                                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"

/* sum += a·b, begun and not ended: a is 64 × 16, in registers or in shared memory, b 16 × 64. */
__device__ __forceinline__ void multiply_own(float (&sum)[32], const u32 (&a)[4], u64 b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; " HOW OUT ", {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
                 : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b) : "memory");
}
__device__ __forceinline__ void multiply_shared(float (&sum)[32], u64 a, u64 b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; " HOW OUT ", %32, %33, p, 1, 1, 0, 0; }"
                 : SUMS : "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void await_products(float (&sum)[32]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
    for (int i = 0; LEFT == 0 && i < 32; i++) asm volatile("" : "+f"(sum[i])::"memory"); /* only now is it there */
}

/* --- who does what ----------------------------------------------------------------------------------- */

struct Mine {
    u32 warp, lane, group; /* group: the warpgroup */
    u32 own, unit0, row0;  /* the block among those that share the units */
    char *shared;
    u32 base;              /* of shared memory */
    char *around;          /* the buffers of those blocks */
    u32 *turns;            /* how many turns they have sent */
};

__device__ __forceinline__ Mine mine(const Exchange &x) {
    extern __shared__ __align__(128) char shared[];
    Mine m;
    m.warp = threadIdx.x / 32, m.lane = threadIdx.x % 32, m.group = m.warp / 4;
    m.own = blockIdx.x % (u32)x.blocks;
    m.unit0 = m.own * OWNED, m.row0 = blockIdx.x / (u32)x.blocks * (TURNS * ROWS);
    m.shared = shared, m.base = (u32)__cvta_generic_to_shared(shared);
    m.around = x.buffer + blockIdx.x / (u32)x.blocks * x.size;
    m.turns = (u32 *)(m.around + 2 * BUFFER);
    return m;
}

__device__ __forceinline__ u32 full(const Mine &m, u32 stage) { return m.base + AT_BARRIERS + stage * 16; }
__device__ __forceinline__ u32 empty(const Mine &m, u32 stage) { return full(m, stage) + 8; }

struct Ring { /* the stage that is next, and the phase of its barriers */
    u32 stage, phase;
};
__device__ __forceinline__ void advance(Ring &r) {
    if (++r.stage == STAGES) r.stage = 0, r.phase ^= 1;
}

/* --- what goes around -------------------------------------------------------------------------------- */

/* What has gone around as turn p, to shared memory, chunk by chunk. By one warp. */
__device__ __forceinline__ void bring_turn(const Mine &m, u32 p, u32 turn, Ring &r) {
    const char *from = m.around + (p & 1) * BUFFER + (i64)turn * (CHUNKS * CHUNK);
    u32 ready = 0; /* blocks from the first on that are known to have sent */
    for (u32 i = 0; i < CHUNKS; i++, advance(r)) {
        const u32 end = min((i + 1) * CK, (u32)KS);
        if (ready < end) {
            do {
                ready = 0;
#pragma unroll
                for (u32 w = 0; w < (KS + 31) / 32; w++) {
                    const u32 block = w * 32 + m.lane;
                    u32 count = ~0u;
                    if (block < KS)
                        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(m.turns + turn * KS + block) : "memory");
                    const u32 missing = __ballot_sync(~0u, count <= p);
                    if (ready == w * 32) ready += missing ? __ffs(missing) - 1 : 32;
                }
            } while (ready < end);
            asm volatile("fence.acq_rel.gpu;" ::: "memory"); /* what they have sent before that number may be read … */
            __syncwarp();
            between_proxies(); /* … by copies */
        }
        await(empty(m, r.stage), r.phase ^ 1);
        if (m.lane == 0) {
            announce(full(m, r.stage), CHUNK);
            bring(m.base + AT_STAGES + r.stage * CHUNK, from + i * CHUNK, CHUNK, full(m, r.stage));
        }
        __syncwarp();
    }
}

/* Once all threads have sent: a number that is written after all that they have. By another warp. */
__device__ __forceinline__ void tell(const Mine &m, u32 p, u32 turn) {
    await_sent(turn);
    if (m.lane == 0)
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(m.turns + turn * KS + m.own), "r"(p + 1) : "memory");
}

/* Eight units of a row, as turn p; the first 128 threads have them all. */
__device__ __forceinline__ void send(const Mine &m, u32 p, u32 turn, uint4 piece) {
    char *to = m.around + (p & 1) * BUFFER + (i64)turn * (CHUNKS * CHUNK) + m.own * STEP;
    if (threadIdx.x < ROWS * 2) ((uint4 *)to)[threadIdx.x] = piece;
    sent(turn);
}

/* --- the product ------------------------------------------------------------------------------------- */

/* Two neighbours along the depth. A warp has 16 columns, the gates of four units: [gate][unit]. */
__device__ __forceinline__ u32 weights_of(const Loop &l, const Mine &m, u32 column, u32 k) {
    const i64 H = l.hidden, unit = m.unit0 + column / 16 * 4 + column % 4, gate = column % 16 / 4;
    return unit >= H || k >= H ? 0 : *(const u32 *)((const narrow *)l.w_hh + (gate * H + unit) * H + k);
}

__device__ __forceinline__ void load_weights(const Loop &l, const Mine &m, u32 (&w)[KR][4]) {
    auto k_of = [&](int s) { return (s / (CK / 2) * CK + m.group * (CK / 2) + s % (CK / 2)) * 16; }; /* of the group's k-step s */
#pragma unroll
    for (int s = 0; s < KR; s++)
#pragma unroll
        for (int q = 0; q < 4; q++)
            w[s][q] = weights_of(l, m, m.warp % 4 * 16 + m.lane / 4 + q % 2 * 8, k_of(s) + m.lane % 4 * 2 + q / 2 * 8);
    u32 *rest = (u32 *)(m.shared + m.group * ((OF_GROUP - KR) * STEP));
    for (int i = threadIdx.x % 128; i < (OF_GROUP - KR) * STEP / 4; i += 128)
        rest[i] = weights_of(l, m, i / 4 % 64, k_of(KR + i / (STEP / 4)) + i / 256 % 2 * 8 + i % 4 * 2);
    between_proxies(); /* products read it */
}

/* The sums of a warpgroup over its part of the depth. Of eight rows, a thread has two neighbours for each of two columns.
 * `beside` does one thing after another while the hardware multiplies. */
template <int COUNT, class Beside>
__device__ __forceinline__ void product(const Mine &m, const u32 (&w)[KR][4], float (&sum)[32], Ring &r, Beside beside) {
    u64 rest = matrix(m.base + m.group * ((OF_GROUP - KR) * STEP), 1024);
    const u64 stages = matrix(m.base + AT_STAGES + m.group * (CK / 2 * STEP), ROWS * 16);
    u32 before = 0;
    auto next = [&]() { /* where the next chunk lies, once it is there */
        await(full(m, r.stage), r.phase);
        begin_products();
        return stages + r.stage * CHUNK / 16;
    };
    auto release = [&](bool first) { /* the chunk before, once its products are there */
        if (!first) {
            await_products<1>(sum);
            if (m.lane == 0) arrive_at(before);
        }
        before = empty(m, r.stage), advance(r);
    };
#pragma unroll
    for (int i = 0; i < 32; i++) sum[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < KR / (CK / 2); i++) {
        const u64 b = next();
#pragma unroll
        for (int j = 0; j < CK / 2; j++) multiply_own(sum, w[i * (CK / 2) + j], b + j * STEP / 16);
        commit_products();
        if (i < COUNT) beside(i);
        release(i == 0);
    }
#pragma unroll 1
    for (int i = KR / (CK / 2); i < CHUNKS; i++) {
        const u64 b = next();
#pragma unroll
        for (int j = 0; j < CK / 2; j++) multiply_shared(sum, rest + j * STEP / 16, b + j * STEP / 16);
        commit_products();
        rest += CK / 2 * STEP / 16;
        release(false);
    }
#pragma unroll
    for (int i = KR / (CK / 2); i < COUNT; i++) beside(i);
    await_products<0>(sum);
    if (m.lane == 0) arrive_at(before);
}

/* Both warpgroups have sums of all rows: each gives away those of half of them, and ends with the sums of both of the other. */
__device__ __forceinline__ void add_up(const Mine &m, const float (&sum)[32], float (&v)[TILES][4]) {
    float4 *give = (float4 *)(m.shared + AT_SUMS) + m.group * (TILES * 128) + threadIdx.x % 128;
    const float4 *take = (float4 *)(m.shared + AT_SUMS) + (1 - m.group) * (TILES * 128) + threadIdx.x % 128;
    const bool upper = m.group;
#pragma unroll
    for (int e = 0; e < TILES; e++) {
        float other[4];
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const float low = sum[e * 4 + q], high = sum[(TILES + e) * 4 + q];
            other[q] = upper ? low : high, v[e][q] = upper ? high : low;
        }
        give[e * 128] = make_float4(other[0], other[1], other[2], other[3]);
    }
    copied(); /* x's part has come by now, and is seen by all */
    meet();
#pragma unroll
    for (int e = 0; e < TILES; e++) {
        const float4 more = take[e * 128];
        v[e][0] += more.x, v[e][1] += more.y, v[e][2] += more.z, v[e][3] += more.w;
    }
}

/* --- forwards ---------------------------------------------------------------------------------------- */

/* The draws of a thread: four lanes have four neighbouring units of the same four rows. Each draws for one row, and one draw
 * serves the four units and both states. */
struct Draws {
    u64 seed;
    u32 plane, four, cell[4], hidden[4]; /* four: which units; then their thresholds */
};
#define DRAWS (CELL_MODE == DRAWN || HIDDEN_MODE == DRAWN || HIDDEN_MODE == SHARED)

__device__ __forceinline__ Draws draws_of(const Loop &l, u32 unit, bool in) {
    Draws d = {};
    d.plane = CELL_MODE == DRAWN ? l.cell.plane : l.hidden_state.plane, d.four = unit / 4;
    for (int q = 0; q < 4 && in; q++) {
        const Noise cell = noise_of(l.cell, unit / 4 * 4 + q), hidden = noise_of(l.hidden_state, unit / 4 * 4 + q);
        d.cell[q] = cell.threshold, d.hidden[q] = hidden.threshold, d.seed = CELL_MODE == DRAWN ? cell.seed : hidden.seed;
    }
    return d;
}
/* Four bits for c and four for h. */
__device__ __forceinline__ u32 drawn(const Draws &d, u32 example, u32 step) {
    u32 word[4], out = 0;
    if (!DRAWS) return 0;
    philox(word, d.seed, d.four, example, step, d.plane);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        out |= ((word[q] & 0xFFFF) < d.cell[q] ? 1u : 0u) << q;
        out |= ((HIDDEN_MODE == SHARED ? word[q] & 0xFFFF : word[q] >> 16) < d.hidden[q] ? 16u : 0u) << q;
    }
    return out;
}
__device__ __forceinline__ Keep kept(const Noises &n, u32 bits) {
    return {CELL_MODE == EXPECTED ? n.cell.rate : bits & 1 ? 1.0f : 0.0f,
            HIDDEN_MODE == EXPECTED ? n.hidden.rate : bits & 16 ? 1.0f : 0.0f, 0.0f};
}

/* Where a thread reads and writes in memory, at step 0 of the first turn: pieces of 16 bytes of the gates and of y, and items
 * of c. Each is there for those of its rows that the batch has. */
struct Places {
    narrow *gates, *y;
    float *c;
    u32 gates_row, y_row, c_row; /* the rows; beyond all where the units are beyond the last */
};

__device__ __forceinline__ void forward_rows(const Loop &l, const Mine &m) {
    const i64 H = l.hidden;
    const u32 batch = (u32)l.batch;
    /* A thread has one unit, and one row of each tile of its warpgroup. */
    const u32 unit = m.warp % 4 * 4 + m.lane / 4 % 4, upper = m.lane / 16, row = m.group * (ROWS / 2) + m.lane % 4 * 2 + upper;
    const u32 piece_row = threadIdx.x / 2 % ROWS, piece_unit = threadIdx.x % 2 * 8; /* of the gates … */
    const u32 h_row = threadIdx.x % ROWS, h_unit = threadIdx.x / ROWS % 2 * 8;      /* … and of h */
    const bool in = m.unit0 + unit < H;
    u32 w[KR][4];
    load_weights(l, m, w);
    u32 *examples = (u32 *)(m.shared + AT_EXAMPLES);
    if (threadIdx.x < TURNS * ROWS) examples[threadIdx.x] = m.row0 + threadIdx.x < batch ? (u32)l.examples[m.row0 + threadIdx.x] : 0;

    auto beyond = [&](u32 row, u32 unit) { return m.unit0 + unit < H ? m.row0 + row : ~0u / 2; };
    const Places to = {
        (narrow *)l.gates + ((m.row0 + piece_row) * 4 + threadIdx.x / (ROWS * 2)) * H + m.unit0 + piece_unit,
        (narrow *)l.y + (m.row0 + h_row) * H + m.unit0 + h_unit, l.c + (m.row0 + row) * H + m.unit0 + unit,
        beyond(piece_row, piece_unit), threadIdx.x < ROWS * 2 ? beyond(h_row, h_unit) : ~0u / 2, beyond(row, unit)};
    uint4 *own_gates = (uint4 *)(m.shared + AT_GATES) + threadIdx.x;
    const u32 gates_at = m.base + AT_GATES + threadIdx.x * 16;
    auto fetch = [&](u32 turn, i64 at) { /* x's part: the pieces that the thread itself writes later */
        if (to.gates_row + turn * ROWS >= batch) return;
        copy16(gates_at + turn * (PIECES * 16), to.gates + 4 * at);
        copy16(gates_at + turn * (PIECES * 16) + PIECES / 2 * 16, to.gates + 4 * at + 2 * H);
    };

    Noises noises = {};
    const Draws draws = draws_of(l, m.unit0 + unit, in);
    const u32 place = m.lane / 4 % 4; /* among the four lanes */
    float bias[4] = {}, h[TURNS][ITEMS], c[TURNS][ITEMS]; /* those of the turn that is next come first */
    if (in) {
        noises = noises_of(l, m.unit0 + unit);
        for (int q = 0; q < 4; q++) bias[q] = widen(((const narrow *)l.b_x)[q * H + m.unit0 + unit]);
    }
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
        const i64 at = turn * ROWS * H;
#pragma unroll
        for (int e = 0; e < ITEMS; e++) {
            const bool there = to.c_row + turn * ROWS + e * 8 < batch;
            const i64 from = (m.row0 + turn * ROWS + row + e * 8) * H + m.unit0 + unit;
            h[turn][e] = there ? widen(((const narrow *)l.h0)[from]) : 0.0f;
            c[turn][e] = there ? l.c0[from] : 0.0f;
        }
        uint4 piece = make_uint4(0, 0, 0, 0);
        if (to.y_row + turn * ROWS < batch)
            piece = *(const uint4 *)((const narrow *)l.h0 + (m.row0 + turn * ROWS + h_row) * H + m.unit0 + h_unit);
        send(m, 0, turn, piece);
        fetch(turn, at);
    }
    meet(); /* the examples are there */

    narrow *gates = (narrow *)(m.shared + AT_GATES) + row * OWNED + unit, *own_h = (narrow *)(m.shared + AT_H) + (unit / 8 * ROWS + row) * 8 + unit % 8;
    Ring ring = {0, 0};
    uint4 piece = make_uint4(0, 0, 0, 0); /* h of the turn before */
    u32 last = 0;                         /* … which it is */
    i64 last_at = -1;                     /* … and where its rows begin; none */
    auto write = [&](int part) {          /* a part of the results of the turn before; then its next x may come */
        const bool gates_there = last_at >= 0 && to.gates_row + last * ROWS < batch;
        if (part < 2 && gates_there) *(uint4 *)(to.gates + 4 * last_at + part * 2 * H) = own_gates[last * PIECES + part * (PIECES / 2)];
        if (part == 1 && gates_there && last_at + batch * H < (i64)l.steps * batch * H) fetch(last, last_at + batch * H);
        if (part == 2 && last_at >= 0 && to.y_row + last * ROWS < batch) *(uint4 *)(to.y + last_at) = piece;
#pragma unroll
        for (int e = 0; part == 3 && e < ITEMS; e++)
            if (last_at >= 0 && to.c_row + last * ROWS + e * 8 < batch) to.c[last_at + e * 8 * H] = c[TURNS - 1][e];
    };
#define PARTS 4
#pragma unroll 1
    for (u32 t = 0; t < (u32)l.steps; t++)
#pragma unroll 1
        for (u32 turn = 0; turn < TURNS; turn++) {
            const i64 at = ((i64)t * batch + turn * ROWS) * H;
            u32 masks = 0;
            float sum[32], v[TILES][4];
            product<PARTS + 1>(m, w, sum, ring, [&](int part) {
                if (part < PARTS)
                    write(part);
                else
                    masks = drawn(draws, examples[turn * ROWS + row + place * 8], (u32)l.first_step + t);
            });
            add_up(m, sum, v);
            narrow *own = gates + turn * (PIECES * 8);
#pragma unroll
            for (int e = 0; e < ITEMS; e++) {
                /* The lower lanes have i and g of their unit for two rows, the upper f and o: each takes one row. */
                const float one = __shfl_xor_sync(~0u, upper ? v[e][0] : v[e][1], 16);
                const float two = __shfl_xor_sync(~0u, upper ? v[e][2] : v[e][3], 16);
                float a[4] = {upper ? one : v[e][0], upper ? v[e][1] : one, upper ? two : v[e][2], upper ? v[e][3] : two};
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    narrow *gate = own + (q * ROWS + e * 8) * OWNED;
                    a[q] += widen(*gate) + bias[q];
                    a[q] = q == 2 ? tanh_at(a[q]) : sigmoid_at(a[q]);
                    *gate = narrowed(a[q]);
                }
                const Keep keep = kept(noises, DRAWS ? __shfl_sync(~0u, masks, (m.lane & ~12) | e << 2) >> place : 0);
                const float raw = lstm_candidate(l, a[0], a[1], a[2], c[0][e], keep);
                c[0][e] = carried_c(l, raw, c[0][e], keep);
                h[0][e] = carried_h(l, a[3] * tanh_at(raw), h[0][e], keep);
                if (to.c_row + turn * ROWS + e * 8 >= batch) h[0][e] = 0.0f;
                own_h[e * 64] = narrowed(h[0][e]);
            }
            meet();
            if (threadIdx.x < ROWS * 2) piece = ((uint4 *)(m.shared + AT_H))[threadIdx.x];
            if (t + 1 < (u32)l.steps) send(m, t + 1, turn, piece);
            last = turn, last_at = at;
#pragma unroll
            for (int e = 0; e < ITEMS; e++) {
                const float old_c = c[0][e], old_h = h[0][e];
#pragma unroll
                for (int k = 0; k + 1 < TURNS; k++) c[k][e] = c[k + 1][e], h[k][e] = h[k + 1][e];
                c[TURNS - 1][e] = old_c, h[TURNS - 1][e] = old_h;
            }
        }
#pragma unroll
    for (int part = 0; part < PARTS; part++) write(part);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(Loop l, Exchange x) {
    simplify(l);
    const Mine m = mine(x);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) init_barrier(full(m, s), 1), init_barrier(empty(m, s), WARPS);
        between_proxies();
    }
    __syncthreads();
    if (m.warp < WARPS) {
        take_registers();
        forward_rows(l, m);
        return;
    }
    give_registers();
    Ring ring = {0, 0};
    for (u32 p = 0; p < (u32)l.steps; p++)
        for (u32 turn = 0; turn < TURNS; turn++) {
            if (m.warp == WARPS) bring_turn(m, p, turn, ring);
            if (m.warp == WARPS + 1) tell(m, p, turn);
        }
}
