/* All steps in one launch: each block keeps its part of W_h on the chip, for some units and rows over all time.
 *
 * A group of blocks shares the units; several groups share the rows. At each step the blocks of a group exchange
 * values through memory: h in the forward pass, the gradients of h·Wh, [unit][gate], in the backward pass. Each of
 * 8 warps computes the product over its own part of the depth. The eight sums are added in a fixed order. A k-step
 * is 32 bytes of the depth. A chunk is the k-steps that a warp loads together. A piece is 16 bytes. Macros:
 *
 *   BACKWARD            0: forward pass; 1: backward pass
 *   UNITS_PER_BLOCK     a multiple of 4
 *   ROUNDED_UNITS       UNITS_PER_BLOCK rounded up to 8, 16 or 32
 *   K_STEPS             per warp, even
 *   RESIDENT_K_STEPS    k-steps of a warp with their weights in registers; the others are in shared memory
 *   PAIRS_PER_CHUNK     pairs of k-steps in a chunk
 *   CHUNKS_IN_FLIGHT    chunks on their way to shared memory
 *   ROW_TILES           tiles of 16 rows in a group of blocks
 *   ROW_OCTETS          groups of 8 rows that are read
 *   SUM_BUFFERS         sets of sums, used in alternation: 1 or 2
 *   HALF                1: float operands are exchanged in half precision, which has as many mantissa bits as TF32
 *   K_STEPS_PER_FACTOR  k-steps whose values come from the same block, if SCALED
 *   SOURCE_BLOCKS       blocks that the values of a warp come from, at most, if SCALED
 *
 * Gradients can have any size, half precision cannot. So if SCALED, each block multiplies the gradients of a row by
 * a power of two that brings the largest near the largest of half precision. It sends the factor that undoes this
 * too. The sums over K_STEPS_PER_FACTOR k-steps are computed separately, and added times the factor. W_h has one
 * such power of two.
 *
 * There are no flags and no fences: the lowest bit of every 8 bytes, the tag, tells which exchange they belong to.
 * Two buffers alternate, and the tag changes each time a buffer is used again. A block that has read all of step t
 * - 1 knows that all blocks have read step t - 2, so it may overwrite that with step t. A block that reads too
 * early reads again. Each factor has a tag too, is in the same buffers, and is read before anything of the next
 * step is sent: the same holds for factors.
 */
#define WARPS 8
#define THREADS (32 * WARPS)
#define ROWS (16 * ROW_TILES)
#define OPERAND_TYPE (HALF ? 2 : TYPE)            /* type of the operands of the product, as TYPE */
#define VALUES_PER_K_STEP (OPERAND_TYPE ? 16 : 8) /* always 32 bytes */
#define VALUES_PER_WARP (K_STEPS * VALUES_PER_K_STEP)
#define VALUES_PER_UNIT (!BACKWARD || GATES == 1 ? 1 : GATES <= 4 ? 4 : 8) /* exchanged values of one unit */
#define COLUMNS (BACKWARD ? UNITS_PER_BLOCK : UNITS_PER_BLOCK * GATES)
#define COLUMN_TILES ((COLUMNS + 7) / 8)
/* floats; without bank conflicts when sums are written */
#define SUM_PITCH (COLUMN_TILES * 8 + (COLUMN_TILES % 2 ? 0 : 8))
#define ROWS_AT_ONCE (THREADS / ROUNDED_UNITS)
#define ROWS_PER_THREAD ((ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE)
#define SCALED (BACKWARD && HALF)
/* Independent accumulators, so that a product need not wait for the one before. One in the forward pass for all
 * tilings: the bits of a row must not depend on the size of its batch. */
#define ACCUMULATORS (BACKWARD && !SCALED && ROW_TILES * COLUMN_TILES < 4 ? 2 : 1)
#define CHUNKS ((K_STEPS / 2 + PAIRS_PER_CHUNK - 1) / PAIRS_PER_CHUNK)
#define PIECES (PAIRS_PER_CHUNK * ROW_TILES * 2)  /* maximum pieces of a chunk that a thread copies */
#define VALUES_PER_PIECE (OPERAND_TYPE ? 8 : 4)   /* numbers of a piece */
#define VALUE_BYTES (WARPS * K_STEPS * ROWS * 32) /* of the exchanged values of a group */
/* of the factors that a warp reads: float [SOURCE_BLOCKS][ROW_OCTETS · 8] */
#define FACTOR_BYTES (SOURCE_BLOCKS * ROW_OCTETS * 32)
#define FACTOR_PIECES ((FACTOR_BYTES / 16 + 31) / 32) /* maximum pieces of factors that a thread copies */

struct Exchange {
    /* [2][groups], zero: [pairs of k-steps][ROWS / 8][8 rows][4 pieces][16 bytes], then the factors of all blocks */
    char *buffer;
    i64 size;          /* bytes of a group in one buffer */
    i64 blocks;        /* blocks of a group */
    const float *peak; /* SCALED: the largest |W_h| */
};

/* --- operands of the product ----------------------------------------------------------------------- */

/* HALF: clamp to the range of half precision; NaN stays NaN. SCALED values are in range. */
__device__ __forceinline__ float clamp_to_half(float v) {
    return !HALF || SCALED ? v : v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
}

#if OPERAND_TYPE
__device__ __forceinline__ u32 operand_pair(float low, float high) {
    return pair_as<OPERAND_TYPE>(clamp_to_half(low), clamp_to_half(high));
}
__device__ __forceinline__ float widen_operand(u32 v) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"((u16)v));
    return OPERAND_TYPE == 1 ? __uint_as_float(v << 16) : out;
}
#endif

#if SCALED
struct Scale {           /* of W_h: scales its largest value to between 2^14 and 2^15 */
    float by;            /* NaN if W_h is not finite, so that all results are NaN */
    int factor_exponent; /* the exponent that the factors of rows also undo … */
    float leftover;      /* … and the rest, for W_h beyond 2^15: multiplied with the result */
};

__device__ __forceinline__ Scale weight_scale(const float *peak) {
    u32 top = __float_as_uint(*peak);
    int e = min(scale_exponent(top), 126);
    return {top >= 0x7F800000 ? __uint_as_float(0x7FC00000) : power_of_two(e), max(e, 0), power_of_two(max(-e, 0))};
}
#endif

/* --- weights -------------------------------------------------------------------------------------- */

/* The weight between exchanged value k and column n of the block. */
__device__ __forceinline__ narrow weight_at(const Loop &l, u32 unit0, u32 k, u32 n) {
    const u32 H = (u32)l.hidden, unit = unit0 + (BACKWARD ? n : n / GATES);
    const u32 source = BACKWARD ? k / VALUES_PER_UNIT : k, gate = BACKWARD ? k % VALUES_PER_UNIT : n % GATES;
    if (n >= COLUMNS || unit >= H || source >= H || gate >= GATES) return 0;
    return ((const narrow *)l.w_hh)[((i64)gate * H + (BACKWARD ? source : unit)) * H + (BACKWARD ? unit : source)];
}

/* Word `word` of a piece of weights; HALF: times `by`. */
__device__ __forceinline__ u32 weight_word(const Loop &l, float by, u32 unit0, u32 piece, u32 word, u32 n) {

#if OPERAND_TYPE
    u32 k = piece * 8 + word * 2;
    narrow low = weight_at(l, unit0, k, n), high = weight_at(l, unit0, k + 1, n);
#if HALF
    return operand_pair(low * by, high * by);
#else
    return (u32)low | (u32)high << 16;
#endif
#else
    return tf32_bits(weight_at(l, unit0, piece * 4 + word, n));
#endif
}

struct Weights { /* of one thread */
    u32 in_registers[RESIDENT_K_STEPS][COLUMN_TILES][2];
    u32 in_shared; /* address in shared memory: [K_STEPS - RESIDENT_K_STEPS][COLUMN_TILES][32 lanes][8 bytes] */
};

__device__ __forceinline__ void load_weights(const Loop &l, float by, Weights &w, u32 unit0, u32 warp, u32 lane,
                                             uint2 *shared) {
    auto at = [&](int s, int n, int half) { /* of k-step s and eight columns */
        return weight_word(l, by, unit0, (warp * K_STEPS + s) * 2 + half, lane % 4, n * 8 + lane / 4);
    };
#pragma unroll
    for (int s = 0; s < RESIDENT_K_STEPS; s++)
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) w.in_registers[s][n][half] = at(s, n, half);
    shared += warp * ((K_STEPS - RESIDENT_K_STEPS) * COLUMN_TILES * 32) + lane;
    w.in_shared = (u32)__cvta_generic_to_shared(shared);
    for (int s = RESIDENT_K_STEPS; s < K_STEPS; s++)
        for (int n = 0; n < COLUMN_TILES; n++)
            shared[((s - RESIDENT_K_STEPS) * COLUMN_TILES + n) * 32] = make_uint2(at(s, n, 0), at(s, n, 1));
}

__device__ __forceinline__ uint2 weights_of_k_step(const Weights &w, int s, int n) {
    if (s < RESIDENT_K_STEPS) /* the index is in bounds for all s */
        return make_uint2(w.in_registers[s < RESIDENT_K_STEPS ? s : 0][n][0],
                          w.in_registers[s < RESIDENT_K_STEPS ? s : 0][n][1]);
    uint2 out;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
                 : "=r"(out.x), "=r"(out.y) : "r"(w.in_shared + ((s - RESIDENT_K_STEPS) * COLUMN_TILES + n) * 256));
    return out;
}

/* --- the product ---------------------------------------------------------------------------------- */

/* What a warp reads goes through shared memory: [CHUNKS_IN_FLIGHT · PIECES][8 rows][4 pieces][16 bytes], so 512
 * bytes for each pair of k-steps and eight rows. The pieces of a row are permuted so that no two pieces of a tile
 * use the same banks. Padding values are sent too, so everything can be read without a test. */
struct Reader {
    /* addresses: where a thread copies to; where it reads a row of a tile, for the two k-steps of a pair */
    u32 copy_to, read_from[2];
    u32 tag_mask;       /* 1 if what the thread reads of a tile contains tags */
    const char *source; /* in the first buffer */
    /* a word of one of the blocks that the warp reads from, in the first buffer, or NULL */
    const char *first_word;
    int factors_from;  /* offset of the warp's factors from `source` */
    int factor_pieces; /* pieces of factors from the thread's first one on, of existing blocks */
    /* addresses: where the thread copies factors to, and where it reads the factor of its row of a tile */
    u32 factors_to, factor_at;
    u32 first_offset; /* k-steps of the first source block that belong to another warp */
};

#define EACH_PAIR(chunk) \
    _Pragma("unroll") for (int b = 0; b < PAIRS_PER_CHUNK; b++) if ((chunk) * PAIRS_PER_CHUNK + b < K_STEPS / 2)
#define EACH_TILE _Pragma("unroll") for (int s = 0; s < 2; s++) _Pragma("unroll") for (int m = 0; m < ROW_TILES; m++)
#define STAGE_OFFSET(chunk, octet) ((((chunk) % CHUNKS_IN_FLIGHT) * PIECES + b * ROW_TILES * 2 + (octet)) * 512)

/* Wait until every source block has sent something of this exchange. Most of the data is then present, and is read
 * only once. Reading all of it repeatedly would delay the last writers. */
__device__ __forceinline__ void await_sources(const Reader &x, i64 buffer, u32 tag) {
    u32 v = tag;
    do {
        if (x.first_word)
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(x.first_word + buffer) : "memory");
    } while (__any_sync(~0u, (v ^ tag) & 1));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Wait until all but the last LEFT copies have arrived, for all lanes. */
template <int LEFT>
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
    __syncwarp();
}

/* Factors are copied with the first chunk. */
#define EACH_FACTOR_PIECE(chunk) \
    _Pragma("unroll") for (int i = 0; SCALED && (chunk) == 0 && i < FACTOR_PIECES; i++) if (i * 32 < x.factor_pieces)

__device__ __forceinline__ void copy_chunk(const Reader &x, const char *from, int chunk) {
    EACH_FACTOR_PIECE(chunk)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(x.factors_to + i * 512),
                     "l"(from + x.factors_from + i * 512) : "memory");
    EACH_PAIR(chunk)
#pragma unroll
    for (int octet = 0; octet < ROW_OCTETS; octet++)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(x.copy_to + STAGE_OFFSET(chunk, octet)),
                     "l"(from + ((chunk * PAIRS_PER_CHUNK + b) * (ROWS / 8) + octet) * 512) : "memory");
    commit_copies();
}

/* Copy a chunk over an older one, after all lanes have read that. */
__device__ __forceinline__ void recopy_chunk(const Reader &x, const char *from, int chunk) {
    __syncwarp();
    copy_chunk(x, from, chunk);
}

/* wrong |= v ^ tag, in one instruction. The compiler would otherwise extract the bit from each word. */
__device__ __forceinline__ void check_tag(u32 &wrong, u32 v, u32 tag) {
    asm("lop3.b32 %0, %0, %1, %2, 0xF6;" : "+r"(wrong) : "r"(v), "r"(tag));
}

/* Read the tiles of a chunk; copy it again until all of it belongs to this exchange. */
__device__ __forceinline__ void read_chunk(u32 (&v)[PAIRS_PER_CHUNK][2][ROW_TILES][4], const Reader &x,
                                           const char *from, int chunk, u32 tag) {
    for (;;) {
        u32 wrong = 0, also = 0, factors = 0;
        EACH_PAIR(chunk) EACH_TILE {
            u32 *tile = v[b][s][m];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
                         : "r"(x.read_from[s] + STAGE_OFFSET(chunk, m * 2))
                         : "memory");
        }
        EACH_PAIR(chunk) EACH_TILE {
            u32 *tile = v[b][s][m];
            if (m * 2 < ROW_OCTETS) check_tag(wrong, tile[0], tag), check_tag(also, tile[2], tag);
            if (m * 2 + 1 < ROW_OCTETS) check_tag(wrong, tile[1], tag), check_tag(also, tile[3], tag);
        }
        EACH_FACTOR_PIECE(chunk) {
            u32 tile[4];
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
                         : "r"(x.factors_to + i * 512)
                         : "memory");
#pragma unroll
            for (int n = 0; n < 4; n++) check_tag(factors, tile[n], tag);
        }
        if (!__any_sync(~0u, ((wrong | also) & x.tag_mask) | (factors & 1))) break;
        recopy_chunk(x, from, chunk);
        await_copies<0>();
    }
}

/* SCALED: add the sums of one factor's k-steps, of one tile, times the factor. */
__device__ __forceinline__ void add_scaled(float (&total)[COLUMN_TILES][4], const float (&part)[COLUMN_TILES][4],
                                           const Reader &x, int f, int m) {
    const u32 source_block = (x.first_offset + f * K_STEPS_PER_FACTOR) / (UNITS_PER_BLOCK / 4);
#pragma unroll
    for (int octet = 0; octet < 2; octet++) {
        if (m * 2 + octet >= ROW_OCTETS) continue; /* these rows are not used */
        float factor;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(factor)
            : "r"(x.factor_at + source_block * (ROW_OCTETS * 32) + (m * 2 + octet) * 32));
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
            total[n][octet * 2] = fmaf(part[n][octet * 2], factor, total[n][octet * 2]);
            total[n][octet * 2 + 1] = fmaf(part[n][octet * 2 + 1], factor, total[n][octet * 2 + 1]);
        }
    }
}

/* Multiply the exchanged values by the block's weights. Each warp writes its sums over its part of the depth to
 * `part`. */
__device__ __forceinline__ void product(const Weights &w, float *part, const Reader &x, i64 buffer, u32 tag,
                                        int warp, int lane) {
    /* part_sum: of the k-steps of one factor; added after the next have begun */
    float sum[ACCUMULATORS][ROW_TILES][COLUMN_TILES][4] = {}, part_sum[2][ROW_TILES][COLUMN_TILES][4];
    const char *from = x.source + buffer;
    await_sources(x, buffer, tag);
#pragma unroll
    for (int i = 0; i < CHUNKS_IN_FLIGHT; i++) copy_chunk(x, from, i);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        u32 v[PAIRS_PER_CHUNK][2][ROW_TILES][4];
        await_copies<CHUNKS_IN_FLIGHT - 1>();
        read_chunk(v, x, from, i, tag);
        if (i + CHUNKS_IN_FLIGHT < CHUNKS)
            recopy_chunk(x, from, i + CHUNKS_IN_FLIGHT);
        else
            commit_copies();
        EACH_PAIR(i) EACH_TILE {
            const int k = (i * PAIRS_PER_CHUNK + b) * 2 + s, f = k / K_STEPS_PER_FACTOR;
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) {
                uint2 one = weights_of_k_step(w, k, n);
                float *to = SCALED ? part_sum[f % 2][m][n] : sum[s % ACCUMULATORS][m][n];
                if (SCALED && k % K_STEPS_PER_FACTOR == 0) to[0] = to[1] = to[2] = to[3] = 0.0f;
                multiply_as<OPERAND_TYPE>(to, v[b][s][m], one.x, one.y);
            }
            if (SCALED && k % K_STEPS_PER_FACTOR == 0 && f > 0)
                add_scaled(sum[0][m], part_sum[(f + 1) % 2][m], x, f - 1, m);
        }
    }
#pragma unroll
    for (int m = 0; SCALED && m < ROW_TILES; m++) {
        const int count = K_STEPS / K_STEPS_PER_FACTOR;
        add_scaled(sum[0][m], part_sum[(count + 1) % 2][m], x, count - 1, m);
    }
    if (SUM_BUFFERS == 1) __syncthreads(); /* all threads have read the sums of the step before */
    part += warp * (ROWS * SUM_PITCH) + (lane / 4) * SUM_PITCH + (lane % 4) * 2;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
            float *v = sum[0][m][n];
#pragma unroll
            for (int i = 0; ACCUMULATORS > 1 && i < 4; i++) v[i] += sum[ACCUMULATORS - 1][m][n][i];
            *(float2 *)(part + m * 16 * SUM_PITCH + n * 8) = make_float2(v[0], v[1]);
            *(float2 *)(part + (m * 16 + 8) * SUM_PITCH + n * 8) = make_float2(v[2], v[3]);
        }
}

/* Add the sums of the eight warps, for COUNT adjacent columns. */
template <int COUNT>
__device__ __forceinline__ void total_sums(float *v, const float *part) {
#pragma unroll
    for (int q = 0; q < COUNT; q++) v[q] = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        if (COUNT == 4) {
            float4 one = *(const float4 *)(part + w * (ROWS * SUM_PITCH));
            v[0] += one.x, v[1 % COUNT] += one.y, v[2 % COUNT] += one.z, v[3 % COUNT] += one.w;
        } else {
#pragma unroll
            for (int q = 0; q < COUNT; q++) v[q] += part[w * (ROWS * SUM_PITCH) + q];
        }
    }
}

/* --- the exchange --------------------------------------------------------------------------------- */

struct Thread { /* the position of a thread */
    int warp, lane, u;
    i64 unit0, unit, row0, H, buffer_stride; /* buffer_stride: bytes between the two buffers */
    bool in, has_place;                      /* in: the unit exists; has_place: the buffer has a place for it */
    float *sums;
    uint2 *weights; /* of all warps, those that are not in registers */
    Reader reader;
    char *group_buffer, *unit_buffer; /* the group's part of the first buffer, and the thread's unit in it */
    i64 values_end;                   /* end of the values of all blocks */
    int padding_words;                /* words of 8 bytes after `values_end`, in all rows, that this block sends */
    char *factors;                    /* SCALED: the block's factors in the first buffer */
};

/* Byte offsets of value k and of row r. A warp reads 512 bytes at a time, each thread the values of its own tile. */
__device__ __forceinline__ i64 value_offset(i64 k) {
    return (k / (4 * VALUES_PER_PIECE) * (ROWS / 8) * 32 + k / VALUES_PER_PIECE % 4) * 16 + k % VALUES_PER_PIECE
        * (16 / VALUES_PER_PIECE);
}
__device__ __forceinline__ int row_offset(int r) { return (r / 8 * 32 + r % 8 * 4) * 16; }

/* The offset of the buffer of an exchange, and its tag. */
__device__ __forceinline__ i64 buffer_offset(const Thread &m, i64 generation) {
    return (generation & 1) * m.buffer_stride;
}
__device__ __forceinline__ u32 tag_of(i64 generation) { return (u32)(generation >> 1 & 1) ^ 1; }

#if OPERAND_TYPE
/* Two operands in one word. The first is rounded to the nearest one whose lowest bit is `tag`. */
__device__ __forceinline__ u32 tagged_pair(float low, float high, u32 tag) {
    low = clamp_to_half(low);
    u32 both = operand_pair(low, high), x = both & 0xFFFF;
    if ((x ^ tag) & 1) x += fabsf(low) > fabsf(widen_operand(x)) || !(x & 0x7FFF) ? 1 : -1;
    return (both & 0xFFFF0000) | (x & 0xFFFF);
}
#else
/* this bit is far below the precision of TF32 */
__device__ __forceinline__ u32 tagged(float v, u32 tag) { return (tf32_bits(v) & ~1u) | tag; }
#endif

__device__ __forceinline__ void write8(char *to, u32 low, u32 high) {
    asm volatile("{ .reg .b64 both; mov.b64 both, {%1, %2}; st.relaxed.gpu.global.u64 [%0], both; }"
                 ::"l"(to), "r"(low), "r"(high) : "memory");
}

/* Send the values of one unit of one row, [VALUES_PER_UNIT], zeros for padding. All lanes of a warp must call this.
 * If units have one value each, the lane of the first of four units (two of 32 bits) sends 8 bytes for all. */
__device__ __forceinline__ void send(const Thread &m, i64 generation, int r, const float *v) {
    char *to = m.unit_buffer + buffer_offset(m, generation) + row_offset(r);
    const u32 tag = tag_of(generation);
    const bool in = m.has_place && r < ROWS;

#if OPERAND_TYPE
    if (VALUES_PER_UNIT == 1) {
        u32 one = m.u % 4 ? operand_pair(v[0], 0.0f) : tagged_pair(v[0], 0.0f, tag);
        u32 two = one | __shfl_down_sync(~0u, one, 1) << 16, more = __shfl_down_sync(~0u, two, 2);
        if (in && m.u % 4 == 0) write8(to, two, more);
    } else if (in) {
#pragma unroll
        for (int q = 0; q < VALUES_PER_UNIT; q += 4)
            write8(to + q * 2, tagged_pair(v[q], v[(q + 1) % VALUES_PER_UNIT], tag),
                operand_pair(v[(q + 2) % VALUES_PER_UNIT], v[(q + 3) % VALUES_PER_UNIT]));
    }
#else
    if (VALUES_PER_UNIT == 1) {
        u32 beside = __shfl_down_sync(~0u, tf32_bits(v[0]), 1);
        if (in && m.u % 2 == 0) write8(to, tagged(v[0], tag), beside);
    } else if (in) {
#pragma unroll
        for (int q = 0; q < VALUES_PER_UNIT; q += 2)
            write8(to + q * 4, tagged(v[q], tag), tf32_bits(v[(q + 1) % VALUES_PER_UNIT]));
    }
#endif
}

#if SCALED
/* Scale the values of a row by the power of two that brings the largest of the block to between 2^14 and 2^15. Send
 * the factor that undoes this and the scale of W_h. All lanes of a warp must call this. A row with a value that is
 * not finite has the factor NaN. A row of zeros has the factor zero, so that its tags add nothing. */
__device__ __forceinline__ void scale_rows(const Thread &m, const Scale &s, i64 generation,
                                           float (&v)[ROWS_PER_THREAD][VALUES_PER_UNIT]) {
    u32 top[ROWS_PER_THREAD] = {};
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; i++)
        for (int q = 0; q < GATES; q++) top[i] = max(top[i], magnitude_bits(v[i][q]));
#pragma unroll
    for (int sub_row = 0; sub_row < 32 / ROUNDED_UNITS; sub_row++) /* rows that a warp processes at once */
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; i++) {
            u32 most = warp_max(m.lane / ROUNDED_UNITS == sub_row ? top[i] : 0);
            if (m.lane / ROUNDED_UNITS == sub_row) top[i] = most;
        }
#pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; i++) {
        const int r = threadIdx.x / ROUNDED_UNITS + i * ROWS_AT_ONCE,
            e = min(scale_exponent(top[i]), 126 - s.factor_exponent);
        for (int q = 0; q < GATES; q++) v[i][q] *= power_of_two(e);
        u32 factor = top[i] >= 0x7F800000 ? 0x7FC00000 : top[i]
            ? __float_as_uint(power_of_two(-e - s.factor_exponent)) : 0;
        if (m.u == 0 && r < ROW_OCTETS * 8)
            asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(m.factors + buffer_offset(m, generation) + r * 4),
                         "r"(factor | tag_of(generation)) : "memory");
    }
}
#endif

/* Padding after the last unit is read too: the last block sends it, as zeros with the tag. */
__device__ __forceinline__ void send_padding(const Thread &m, i64 generation) {
    for (int i = threadIdx.x; i < m.padding_words; i += THREADS)
        write8(m.group_buffer + buffer_offset(m, generation) +
                   value_offset(m.values_end + i / ROWS * (VALUES_PER_PIECE / 2)) + row_offset(i % ROWS),
               tag_of(generation), 0);
}

__device__ __forceinline__ Thread thread_of(const Loop &l, const Exchange &x) {
    extern __shared__ __align__(16) char shared[];
    Thread m;
    int groups = gridDim.x / (int)x.blocks, group = blockIdx.x / (int)x.blocks, block = blockIdx.x % (int)x.blocks;
    m.warp = threadIdx.x / 32, m.lane = threadIdx.x % 32, m.u = threadIdx.x % ROUNDED_UNITS;
    m.H = l.hidden, m.unit0 = (i64)block * UNITS_PER_BLOCK, m.unit = m.unit0 + m.u, m.row0 = (i64)group * ROWS;
    m.in = m.u < UNITS_PER_BLOCK && m.unit < m.H;
    m.has_place = m.u < UNITS_PER_BLOCK && m.unit * VALUES_PER_UNIT < WARPS * VALUES_PER_WARP;
    m.sums = (float *)shared;
    m.weights = (uint2 *)(shared + SUM_BUFFERS * WARPS * ROWS * SUM_PITCH * 4);
    char *stages = (char *)(m.weights + WARPS * (K_STEPS - RESIDENT_K_STEPS) * COLUMN_TILES * 32);
    for (int i = threadIdx.x; i < WARPS * (CHUNKS_IN_FLIGHT * PIECES * 128 + FACTOR_BYTES / 4); i += THREADS)
        ((u32 *)stages)[i] = 0;
    u32 stage = (u32)__cvta_generic_to_shared(stages) + m.warp * (CHUNKS_IN_FLIGHT * PIECES * 512);
    auto piece = [](int row, int k) { return (row * 4 + (k ^ (row >> 1 & 3))) * 16; };
    m.reader.copy_to = stage + piece(m.lane / 4, m.lane % 4);
    for (int s = 0; s < 2; s++)
        m.reader.read_from[s] = stage + m.lane / 8 % 2 * 512 + piece(m.lane % 8, s * 2 + m.lane / 16);
    m.reader.tag_mask = ~m.lane & 1;
    const i64 size = SCALED ? x.size : (i64)VALUE_BYTES; /* a constant without factors */
    m.buffer_stride = groups * size;
    char *group_buffer = m.group_buffer = x.buffer + group * size;
    m.values_end = x.blocks * UNITS_PER_BLOCK * VALUES_PER_UNIT;
    m.padding_words = block + 1 < x.blocks ? 0
        : (int)(WARPS * VALUES_PER_WARP - m.values_end) / (VALUES_PER_PIECE / 2) * ROWS;
    m.reader.source = group_buffer + (m.warp * (K_STEPS / 2) * (ROWS / 8) * 32 + m.lane) * 16;
    i64 source_block = m.warp * VALUES_PER_WARP / VALUES_PER_UNIT / UNITS_PER_BLOCK + m.lane;
    i64 at = source_block * UNITS_PER_BLOCK * VALUES_PER_UNIT; /* one of the warp's source blocks */
    m.reader.first_word = source_block < x.blocks && at < (i64)(m.warp + 1) * VALUES_PER_WARP
                       ? group_buffer + value_offset(at) + row_offset(ROWS - 1) : nullptr;
    i64 k = m.unit * VALUES_PER_UNIT;
    m.unit_buffer = group_buffer + value_offset(k);
    if (SCALED) {
        const int first = m.warp * K_STEPS / (UNITS_PER_BLOCK / 4),
            exists = min(SOURCE_BLOCKS, (int)x.blocks - first) * ROW_OCTETS * 2;
        const u32 factors = (u32)__cvta_generic_to_shared(stages) + WARPS * (CHUNKS_IN_FLIGHT * PIECES * 512) + m.warp
            * FACTOR_BYTES;
        m.factors = group_buffer + VALUE_BYTES + block * (ROW_OCTETS * 32);
        m.reader.factors_from = (int)(group_buffer + VALUE_BYTES + first * (ROW_OCTETS * 32) + m.lane
            * 16 - m.reader.source);
        m.reader.factor_pieces = exists - m.lane;
        m.reader.factors_to = factors + m.lane * 16;
        m.reader.factor_at = factors + m.lane / 4 * 4;
        m.reader.first_offset = K_STEPS % (UNITS_PER_BLOCK / 4) ? m.warp * K_STEPS % (UNITS_PER_BLOCK / 4) : 0;
    }
    /* Hide the origin of these addresses from the compiler: it would otherwise recompute them for every piece. */
    asm volatile("" : "+r"(m.reader.copy_to), "+r"(m.reader.read_from[0]), "+r"(m.reader.read_from[1]),
        "+l"(m.reader.source), "+l"(m.unit_buffer));
    __syncthreads();
    return m;
}

#define EACH_ROW                                                                        \
    _Pragma("unroll") for (int i = 0; i < ROWS_PER_THREAD; i++)                                    \
        if (i64 r = threadIdx.x / ROUNDED_UNITS + i * ROWS_AT_ONCE, row = m.row0 + r; m.in && r < ROWS)
#define LOAD_LENGTHS(length)                             \
    _Pragma("unroll") for (int i = 0; i < ROWS_PER_THREAD; i++) { \
        i64 row = m.row0 + threadIdx.x / ROUNDED_UNITS + i * ROWS_AT_ONCE; \
        length[i] = row < l.batch ? (int)length_of(l, row) : 0; \
    }
#define SUMS_OF_STEP(t) (m.sums + ((t) & (SUM_BUFFERS - 1)) * (WARPS * ROWS * SUM_PITCH))

