/* The forward pass of an LSTM with many rows, all steps in one launch: warpgroups multiply, W_h is spread over the
 * chip.
 *
 * A slab is 64 rows. A k-step is 16 units of the depth, as many as a block owns. Macros:
 *
 *   K_STEPS            also the blocks of a group, which share the units
 *   SLABS              slabs that a block processes, one after the other
 *   K_STEPS_PER_CHUNK  k-steps that are copied together
 *   STAGES             chunks on their way to shared memory
 *   RESIDENT_K_STEPS   k-steps of a warpgroup with their weights in registers, whole chunks; others in shared memory
 *
 * It has none of the optional FEATURES, and the modes of both noise streams are known: zoneout by unit, full
 * lengths.
 *
 * Two warpgroups compute half of the k-steps each: the four gates of the block's 16 units for 64 rows. Other warps
 * copy h to shared memory, and tell the other blocks how many steps this block has sent. h is in the order that
 * products need, [unit / 8][row][unit % 8], so a chunk is one copy. Two buffers alternate: a block that has sent
 * step p has read all of step p - 1, so step p + 1 may overwrite that. While h of one slab is exchanged, the other
 * slab is multiplied. While the hardware multiplies, masks are drawn and the results of the slab before are
 * written.
 */
#define WARPS 8 /* warps that multiply */
/* the third warpgroup has two working warps: registers are distributed by warpgroups */
#define THREADS (32 * WARPS + 128)
#define ROWS 64
#define UNITS_PER_BLOCK 16 /* units of a block */
#define CHUNKS ((K_STEPS + K_STEPS_PER_CHUNK - 1) / K_STEPS_PER_CHUNK)
#define K_STEPS_PER_WARPGROUP (CHUNKS * K_STEPS_PER_CHUNK / 2) /* those past the last one are zero */
#define K_STEP_BYTES (ROWS * 32)                               /* of h, and of weights */
#define CHUNK_BYTES (K_STEPS_PER_CHUNK * K_STEP_BYTES)
#define TILES (ROWS / 8 / 2)  /* of eight rows: the tiles whose complete sums a warpgroup has at the end */
#define ROWS_PER_THREAD TILES /* in a slab */
#define PIECES (4 * ROWS * 2) /* of 16 bytes: the gates of a slab, [gate][row][unit / 8] */

struct Exchange {
    char *buffer; /* by group: [2][SLABS][CHUNKS][CHUNK_BYTES], then u32 [SLABS][K_STEPS], all zero */
    i64 size;     /* bytes of a group */
    i64 blocks;   /* blocks of a group */
    const float *peak;
};
#define BUFFER_BYTES ((i64)SLABS * CHUNKS * CHUNK_BYTES)

/* Offsets in shared memory, after the weights that are not in registers: [warpgroup][k-step][depth /
 * 8][column][depth % 8]. */
#define AT_STAGES (2 * (K_STEPS_PER_WARPGROUP - RESIDENT_K_STEPS) * K_STEP_BYTES)
#define AT_SUMS (AT_STAGES + STAGES * CHUNK_BYTES)
#define AT_GATES (AT_SUMS + 2 * TILES * 128 * 16)    /* [SLABS][gate][row][unit]: x's part, then the gates */
#define AT_H (AT_GATES + SLABS * PIECES * 16)        /* [unit / 8][row][unit % 8] */
#define AT_EXAMPLES (AT_H + K_STEP_BYTES)            /* [SLABS][row] */
#define AT_BARRIERS (AT_EXAMPLES + SLABS * ROWS * 4) /* of each stage: full, empty */

/* --- asynchronous hardware -------------------------------------------------------------------------- */

/* A barrier in shared memory. A phase ends after a number of arrivals and of announced bytes. */
__device__ __forceinline__ void init_barrier(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void expect_bytes(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void await_barrier(u32 at, u32 phase) {
    u32 done;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at), "r"(phase) : "memory");
    } while (!done);
}

/* Copy bytes to shared memory; a barrier counts them. Only a fence orders ordinary stores before such a copy. */
__device__ __forceinline__ void copy_bulk(u32 to, const char *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void copy16(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
}

/* Registers of a thread: the warpgroup that does not multiply releases most of its own. */
__device__ __forceinline__ void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(40)); }
__device__ __forceinline__ void claim_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(232)); }

/* Barriers of the warps that multiply; and with the warp that publishes the count, for which they do not wait. */
__device__ __forceinline__ void sync_compute_warps() {
    asm volatile("bar.sync %0, %1;" ::"n"(1), "n"(32 * WARPS) : "memory");
}
__device__ __forceinline__ void signal_sent(u32 slab) {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 + slab), "n"(32 * WARPS + 32) : "memory");
}
__device__ __forceinline__ void await_sent(u32 slab) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + slab), "n"(32 * WARPS + 32) : "memory");
}

/* The descriptor of a matrix in shared memory: eight rows of 16 bytes are adjacent, groups of eight rows are 128
 * bytes apart, the next 8 values of the depth are `far` bytes apart. */
__device__ __forceinline__ u64 matrix_descriptor(u32 at, u32 far) {
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

/* Start sum += a·b. a is 64 × 16, in registers or in shared memory; b is 16 × 64. */
__device__ __forceinline__ void multiply_resident(float (&sum)[32], const u32 (&a)[4], u64 b) {
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
    /* the sums are complete only now */
    for (int i = 0; LEFT == 0 && i < 32; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

/* --- the position of a thread ------------------------------------------------------------------------ */

struct Thread {
    u32 warp, lane, group;  /* group: the warpgroup */
    u32 block, unit0, row0; /* the block's index in its group */
    char *shared;
    u32 base;         /* address of shared memory */
    char *buffers;    /* the exchange buffers of the group */
    u32 *sent_counts; /* the number of steps that each block has sent */
};

__device__ __forceinline__ Thread thread_of(const Exchange &x) {
    extern __shared__ __align__(128) char shared[];
    Thread m;
    m.warp = threadIdx.x / 32, m.lane = threadIdx.x % 32, m.group = m.warp / 4;
    m.block = blockIdx.x % (u32)x.blocks;
    m.unit0 = m.block * UNITS_PER_BLOCK, m.row0 = blockIdx.x / (u32)x.blocks * (SLABS * ROWS);
    m.shared = shared, m.base = (u32)__cvta_generic_to_shared(shared);
    m.buffers = x.buffer + blockIdx.x / (u32)x.blocks * x.size;
    m.sent_counts = (u32 *)(m.buffers + 2 * BUFFER_BYTES);
    return m;
}

__device__ __forceinline__ u32 full_barrier(const Thread &m, u32 stage) { return m.base + AT_BARRIERS + stage * 16; }
__device__ __forceinline__ u32 empty_barrier(const Thread &m, u32 stage) { return full_barrier(m, stage) + 8; }

struct StageRing { /* the next stage, and the phase of its barriers */
    u32 stage, phase;
};
__device__ __forceinline__ void advance(StageRing &r) {
    if (++r.stage == STAGES) r.stage = 0, r.phase ^= 1;
}

/* --- the exchange ------------------------------------------------------------------------------------- */

/* Copy a step's h of one slab to shared memory, chunk by chunk. Run by one warp. */
__device__ __forceinline__ void load_slab(const Thread &m, u32 step, u32 slab, StageRing &r) {
    const char *from = m.buffers + (step & 1) * BUFFER_BYTES + (i64)slab * (CHUNKS * CHUNK_BYTES);
    u32 ready = 0; /* blocks, from the first on, that have sent this step */
    for (u32 i = 0; i < CHUNKS; i++, advance(r)) {
        const u32 end = min((i + 1) * K_STEPS_PER_CHUNK, (u32)K_STEPS);
        if (ready < end) {
            do {
                ready = 0;
#pragma unroll
                for (u32 w = 0; w < (K_STEPS + 31) / 32; w++) {
                    const u32 block = w * 32 + m.lane;
                    u32 count = ~0u;
                    if (block < K_STEPS)
                        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count)
                            : "l"(m.sent_counts + slab * K_STEPS + block) : "memory");
                    const u32 missing = __ballot_sync(~0u, count <= step);
                    if (ready == w * 32) ready += missing ? __ffs(missing) - 1 : 32;
                }
            } while (ready < end);
            asm volatile("fence.acq_rel.gpu;" ::: "memory"); /* what they sent before may be read … */
            __syncwarp();
            fence_async_proxy(); /* … by bulk copies */
        }
        await_barrier(empty_barrier(m, r.stage), r.phase ^ 1);
        if (m.lane == 0) {
            expect_bytes(full_barrier(m, r.stage), CHUNK_BYTES);
            copy_bulk(m.base + AT_STAGES + r.stage * CHUNK_BYTES, from + i * CHUNK_BYTES, CHUNK_BYTES,
                full_barrier(m, r.stage));
        }
        __syncwarp();
    }
}

/* Publish the number of sent steps, after all threads have sent. Run by another warp. */
__device__ __forceinline__ void publish_count(const Thread &m, u32 step, u32 slab) {
    await_sent(slab);
    if (m.lane == 0)
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(m.sent_counts + slab * K_STEPS + m.block),
            "r"(step + 1) : "memory");
}

/* Send eight units of a row; the first 128 threads have all rows of a slab. */
__device__ __forceinline__ void send(const Thread &m, u32 step, u32 slab, uint4 piece) {
    char *to = m.buffers + (step & 1) * BUFFER_BYTES + (i64)slab * (CHUNKS * CHUNK_BYTES) + m.block * K_STEP_BYTES;
    if (threadIdx.x < ROWS * 2) ((uint4 *)to)[threadIdx.x] = piece;
    signal_sent(slab);
}

/* --- the product ------------------------------------------------------------------------------------- */

/* Two adjacent values along the depth. A warp has 16 columns, the gates of four units: [gate][unit]. */
__device__ __forceinline__ u32 weight_word(const Loop &l, const Thread &m, u32 column, u32 k) {
    const i64 H = l.hidden, unit = m.unit0 + column / 16 * 4 + column % 4, gate = column % 16 / 4;
    return unit >= H || k >= H ? 0 : *(const u32 *)((const narrow *)l.w_hh + (gate * H + unit) * H + k);
}

__device__ __forceinline__ void load_weights(const Loop &l, const Thread &m, u32 (&w)[RESIDENT_K_STEPS][4]) {
    auto k_of = [&](int s) { /* of the warpgroup's k-step s */
        const int half_chunk = K_STEPS_PER_CHUNK / 2;
        return (s / half_chunk * K_STEPS_PER_CHUNK + m.group * half_chunk + s % half_chunk) * 16;
    };
#pragma unroll
    for (int s = 0; s < RESIDENT_K_STEPS; s++)
#pragma unroll
        for (int q = 0; q < 4; q++)
            w[s][q] = weight_word(l, m, m.warp % 4 * 16 + m.lane / 4 + q % 2 * 8, k_of(s) + m.lane % 4 * 2 + q / 2 * 8);
    u32 *shared_weights = (u32 *)(m.shared + m.group * ((K_STEPS_PER_WARPGROUP - RESIDENT_K_STEPS) * K_STEP_BYTES));
    for (int i = threadIdx.x % 128; i < (K_STEPS_PER_WARPGROUP - RESIDENT_K_STEPS) * K_STEP_BYTES / 4; i += 128)
        shared_weights[i] = weight_word(l, m, i / 4 % 64,
            k_of(RESIDENT_K_STEPS + i / (K_STEP_BYTES / 4)) + i / 256 % 2 * 8 + i % 4 * 2);
    fence_async_proxy(); /* products read them */
}

/* The sums of a warpgroup over its part of the depth. Of eight rows, a thread has two adjacent rows for each of two
 * columns. `overlapped(i)`, i < COUNT, is called while the hardware multiplies. */
template <int COUNT, class Beside>
__device__ __forceinline__ void product(const Thread &m, const u32 (&w)[RESIDENT_K_STEPS][4], float (&sum)[32],
                                        StageRing &r, Beside overlapped) {
    u64 shared_weights = matrix_descriptor(m.base + m.group
        * ((K_STEPS_PER_WARPGROUP - RESIDENT_K_STEPS) * K_STEP_BYTES), 1024);
    const u64 stages = matrix_descriptor(m.base + AT_STAGES + m.group * (K_STEPS_PER_CHUNK / 2 * K_STEP_BYTES),
        ROWS * 16);
    u32 before = 0;
    auto next = [&]() { /* wait for the next chunk; return its descriptor */
        await_barrier(full_barrier(m, r.stage), r.phase);
        begin_products();
        return stages + r.stage * CHUNK_BYTES / 16;
    };
    auto release = [&](bool first) { /* release the chunk before, after its products */
        if (!first) {
            await_products<1>(sum);
            if (m.lane == 0) arrive(before);
        }
        before = empty_barrier(m, r.stage), advance(r);
    };
#pragma unroll
    for (int i = 0; i < 32; i++) sum[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < RESIDENT_K_STEPS / (K_STEPS_PER_CHUNK / 2); i++) {
        const u64 b = next();
#pragma unroll
        for (int j = 0; j < K_STEPS_PER_CHUNK / 2; j++)
            multiply_resident(sum, w[i * (K_STEPS_PER_CHUNK / 2) + j], b + j * K_STEP_BYTES / 16);
        commit_products();
        if (i < COUNT) overlapped(i);
        release(i == 0);
    }
#pragma unroll 1
    for (int i = RESIDENT_K_STEPS / (K_STEPS_PER_CHUNK / 2); i < CHUNKS; i++) {
        const u64 b = next();
#pragma unroll
        for (int j = 0; j < K_STEPS_PER_CHUNK / 2; j++)
            multiply_shared(sum, shared_weights + j * K_STEP_BYTES / 16, b + j * K_STEP_BYTES / 16);
        commit_products();
        shared_weights += K_STEPS_PER_CHUNK / 2 * K_STEP_BYTES / 16;
        release(false);
    }
#pragma unroll
    for (int i = RESIDENT_K_STEPS / (K_STEPS_PER_CHUNK / 2); i < COUNT; i++) overlapped(i);
    await_products<0>(sum);
    if (m.lane == 0) arrive(before);
}

/* Both warpgroups have sums of all rows. Each gives away the sums of half of the rows, and adds those of the other
 * half. */
__device__ __forceinline__ void combine_halves(const Thread &m, const float (&sum)[32], float (&v)[TILES][4]) {
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
    await_copies(); /* also wait for the copies of x's part */
    sync_compute_warps();
#pragma unroll
    for (int e = 0; e < TILES; e++) {
        const float4 more = take[e * 128];
        v[e][0] += more.x, v[e][1] += more.y, v[e][2] += more.z, v[e][3] += more.w;
    }
}

/* --- forward pass ---------------------------------------------------------------------------------------- */

/* The noise of a thread. Four lanes have four adjacent units of the same four rows. Each lane draws for one row,
 * and one draw serves the four units and both states. */
struct MaskDraw {
    u64 seed;
    u32 plane, quad, cell[4], hidden[4]; /* quad: index of the four units; then their thresholds */
};
#define ANY_DRAWN (CELL_MODE == DRAWN || HIDDEN_MODE == DRAWN || HIDDEN_MODE == SHARED)

__device__ __forceinline__ MaskDraw mask_draw_of(const Loop &l, u32 unit, bool in) {
    MaskDraw d = {};
    d.plane = CELL_MODE == DRAWN ? l.cell.plane : l.hidden_state.plane, d.quad = unit / 4;
    for (int q = 0; q < 4 && in; q++) {
        const Noise cell = noise_of(l.cell, unit / 4 * 4 + q), hidden = noise_of(l.hidden_state, unit / 4 * 4 + q);
        d.cell[q] = cell.threshold, d.hidden[q] = hidden.threshold,
            d.seed = CELL_MODE == DRAWN ? cell.seed : hidden.seed;
    }
    return d;
}
/* Draw four bits for c and four for h. */
__device__ __forceinline__ u32 draw_masks(const MaskDraw &d, u32 example, u32 step) {
    u32 word[4], out = 0;
    if (!ANY_DRAWN) return 0;
    philox(word, d.seed, d.quad, example, step, d.plane);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        out |= ((word[q] & 0xFFFF) < d.cell[q] ? 1u : 0u) << q;
        out |= ((HIDDEN_MODE == SHARED ? word[q] & 0xFFFF : word[q] >> 16) < d.hidden[q] ? 16u : 0u) << q;
    }
    return out;
}
__device__ __forceinline__ Keep keep_from_bits(const Noises &n, u32 bits) {
    return {CELL_MODE == EXPECTED ? n.cell.rate : bits & 1 ? 1.0f : 0.0f,
            HIDDEN_MODE == EXPECTED ? n.hidden.rate : bits & 16 ? 1.0f : 0.0f, 0.0f};
}

/* Where a thread reads and writes at step 0 of the first slab: 16-byte pieces of the gates and of y, and elements
 * of c. A place is used if the batch has its row. */
struct Places {
    narrow *gates, *y;
    float *c;
    u32 gates_row, y_row, c_row; /* the rows; beyond all rows if the unit does not exist */
};

__device__ __forceinline__ void forward_rows(const Loop &l, const Thread &m) {
    const i64 H = l.hidden;
    const u32 batch = (u32)l.batch;
    /* A thread has one unit, and one row of each tile of its warpgroup. */
    const u32 unit = m.warp % 4 * 4 + m.lane / 4 % 4, upper = m.lane / 16,
        row = m.group * (ROWS / 2) + m.lane % 4 * 2 + upper;
    const u32 piece_row = threadIdx.x / 2 % ROWS, piece_unit = threadIdx.x % 2 * 8; /* of the gates … */
    const u32 h_row = threadIdx.x % ROWS, h_unit = threadIdx.x / ROWS % 2 * 8;      /* … and of h */
    const bool in = m.unit0 + unit < H;
    u32 w[RESIDENT_K_STEPS][4];
    load_weights(l, m, w);
    u32 *examples = (u32 *)(m.shared + AT_EXAMPLES);
    if (threadIdx.x < SLABS * ROWS)
        examples[threadIdx.x] = m.row0 + threadIdx.x < batch ? (u32)l.examples[m.row0 + threadIdx.x] : 0;
    auto beyond = [&](u32 row, u32 unit) { return m.unit0 + unit < H ? m.row0 + row : ~0u / 2; };
    const Places to = {
        (narrow *)l.gates + ((m.row0 + piece_row) * 4 + threadIdx.x / (ROWS * 2)) * H + m.unit0 + piece_unit,
        (narrow *)l.y + (m.row0 + h_row) * H + m.unit0 + h_unit, l.c + (m.row0 + row) * H + m.unit0 + unit,
        beyond(piece_row, piece_unit), threadIdx.x < ROWS * 2 ? beyond(h_row, h_unit) : ~0u / 2, beyond(row, unit)};
    uint4 *gate_pieces = (uint4 *)(m.shared + AT_GATES) + threadIdx.x;
    const u32 gates_at = m.base + AT_GATES + threadIdx.x * 16;
    auto fetch = [&](u32 slab, i64 at) { /* x's part: the pieces that the same thread writes later */
        if (to.gates_row + slab * ROWS >= batch) return;
        copy16(gates_at + slab * (PIECES * 16), to.gates + 4 * at);
        copy16(gates_at + slab * (PIECES * 16) + PIECES / 2 * 16, to.gates + 4 * at + 2 * H);
    };

    Noises noises = {};
    const MaskDraw draws = mask_draw_of(l, m.unit0 + unit, in);
    const u32 place = m.lane / 4 % 4;                                         /* index among the four lanes */
    float bias[4] = {}, h[SLABS][ROWS_PER_THREAD], c[SLABS][ROWS_PER_THREAD]; /* those of the next slab come first */
    if (in) {
        noises = noises_of(l, m.unit0 + unit);
        for (int q = 0; q < 4; q++) bias[q] = widen(((const narrow *)l.b_x)[q * H + m.unit0 + unit]);
    }
#pragma unroll
    for (u32 slab = 0; slab < SLABS; slab++) {
        const i64 at = slab * ROWS * H;
#pragma unroll
        for (int e = 0; e < ROWS_PER_THREAD; e++) {
            const bool exists = to.c_row + slab * ROWS + e * 8 < batch;
            const i64 from = (m.row0 + slab * ROWS + row + e * 8) * H + m.unit0 + unit;
            h[slab][e] = exists ? widen(((const narrow *)l.h0)[from]) : 0.0f;
            c[slab][e] = exists ? l.c0[from] : 0.0f;
        }
        uint4 piece = make_uint4(0, 0, 0, 0);
        if (to.y_row + slab * ROWS < batch)
            piece = *(const uint4 *)((const narrow *)l.h0 + (m.row0 + slab * ROWS + h_row) * H + m.unit0 + h_unit);
        send(m, 0, slab, piece);
        fetch(slab, at);
    }
    sync_compute_warps(); /* the examples are in shared memory */
    narrow *gates = (narrow *)(m.shared + AT_GATES) + row * UNITS_PER_BLOCK + unit,
        *h_values = (narrow *)(m.shared + AT_H) + (unit / 8 * ROWS + row) * 8 + unit % 8;
    StageRing ring = {0, 0};
    uint4 piece = make_uint4(0, 0, 0, 0); /* h of the slab before */
    u32 previous = 0;                     /* … its index */
    i64 previous_at = -1;                 /* … and its first row; -1: none */
    auto write = [&](int part) {          /* write a part of the results of the slab before, then fetch its next x */
        const bool gates_exist = previous_at >= 0 && to.gates_row + previous * ROWS < batch;
        if (part < 2 && gates_exist) *(uint4 *)(to.gates + 4 * previous_at + part * 2 * H)
            = gate_pieces[previous * PIECES + part * (PIECES / 2)];
        if (part == 1 && gates_exist && previous_at + batch * H < (i64)l.steps * batch * H)
            fetch(previous, previous_at + batch * H);
        if (part == 2 && previous_at >= 0 && to.y_row + previous * ROWS < batch) *(uint4 *)(to.y + previous_at) = piece;
#pragma unroll
        for (int e = 0; part == 3 && e < ROWS_PER_THREAD; e++)
            if (previous_at >= 0 && to.c_row + previous * ROWS + e * 8 < batch)
                to.c[previous_at + e * 8 * H] = c[SLABS - 1][e];
    };
#define WRITES 4
#pragma unroll 1
    for (u32 t = 0; t < (u32)l.steps; t++)
#pragma unroll 1
        for (u32 slab = 0; slab < SLABS; slab++) {
            const i64 at = ((i64)t * batch + slab * ROWS) * H;
            u32 masks = 0;
            float sum[32], v[TILES][4];
            product<WRITES + 1>(m, w, sum, ring, [&](int part) {
                if (part < WRITES)
                    write(part);
                else
                    masks = draw_masks(draws, examples[slab * ROWS + row + place * 8], (u32)l.first_step + t);
            });
            combine_halves(m, sum, v);
            narrow *thread_gates = gates + slab * (PIECES * 8);
#pragma unroll
            for (int e = 0; e < ROWS_PER_THREAD; e++) {
                /* The lower lanes have i and g of their unit for two rows, the upper ones f and o: each lane
                 * completes one row. */
                const float one = __shfl_xor_sync(~0u, upper ? v[e][0] : v[e][1], 16);
                const float two = __shfl_xor_sync(~0u, upper ? v[e][2] : v[e][3], 16);
                float a[4] = {upper ? one : v[e][0], upper ? v[e][1] : one, upper ? two : v[e][2],
                    upper ? v[e][3] : two};
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    narrow *gate = thread_gates + (q * ROWS + e * 8) * UNITS_PER_BLOCK;
                    a[q] += widen(*gate) + bias[q];
                    a[q] = q == 2 ? tanh_approx(a[q]) : sigmoid_approx(a[q]);
                    *gate = narrowed(a[q]);
                }
                const Keep keep = keep_from_bits(noises,
                    ANY_DRAWN ? __shfl_sync(~0u, masks, (m.lane & ~12) | e << 2) >> place : 0);
                const float candidate = lstm_candidate(l, a[0], a[1], a[2], c[0][e], keep);
                c[0][e] = carried_c(l, candidate, c[0][e], keep);
                h[0][e] = carried_h(l, a[3] * tanh_approx(candidate), h[0][e], keep);
                if (to.c_row + slab * ROWS + e * 8 >= batch) h[0][e] = 0.0f;
                h_values[e * 64] = narrowed(h[0][e]);
            }
            sync_compute_warps();
            if (threadIdx.x < ROWS * 2) piece = ((uint4 *)(m.shared + AT_H))[threadIdx.x];
            if (t + 1 < (u32)l.steps) send(m, t + 1, slab, piece);
            previous = slab, previous_at = at;
#pragma unroll
            for (int e = 0; e < ROWS_PER_THREAD; e++) {
                const float old_c = c[0][e], old_h = h[0][e];
#pragma unroll
                for (int k = 0; k + 1 < SLABS; k++) c[k][e] = c[k + 1][e], h[k][e] = h[k + 1][e];
                c[SLABS - 1][e] = old_c, h[SLABS - 1][e] = old_h;
            }
        }
#pragma unroll
    for (int part = 0; part < WRITES; part++) write(part);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(Loop l, Exchange x) {
    simplify(l);
    const Thread m = thread_of(x);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) init_barrier(full_barrier(m, s), 1), init_barrier(empty_barrier(m, s), WARPS);
        fence_async_proxy();
    }
    __syncthreads();
    if (m.warp < WARPS) {
        claim_registers();
        forward_rows(l, m);
        return;
    }
    release_registers();
    StageRing ring = {0, 0};
    for (u32 step = 0; step < (u32)l.steps; step++)
        for (u32 slab = 0; slab < SLABS; slab++) {
            if (m.warp == WARPS) load_slab(m, step, slab, ring);
            if (m.warp == WARPS + 1) publish_count(m, step, slab);
        }
}
