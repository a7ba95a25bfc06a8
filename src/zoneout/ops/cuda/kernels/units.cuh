/* VECTOR adjacent units of one row (1 or 4): loads, stores, positions and random words. Prepended to some sources. */

/* --- adjacent units ------------------------------------------------------------------------------ */

#define EACH_UNIT _Pragma("unroll") for (int e = 0; e < VECTOR; e++)

struct Units { /* one value of each of VECTOR adjacent units */
    float v[VECTOR];
    __device__ __forceinline__ float &operator[](int e) { return v[e]; }
    __device__ __forceinline__ float operator[](int e) const { return v[e]; }
};

__device__ __forceinline__ Units load(const float *from) {
    Units u;
#if VECTOR == 4
    float4 w = *(const float4 *)from;
    u[0] = w.x, u[1] = w.y, u[2] = w.z, u[3] = w.w;
#else
    u[0] = *from;
#endif
    return u;
}

__device__ __forceinline__ void store(float *to, const Units &u) {
#if VECTOR == 4
    *(float4 *)to = make_float4(u[0], u[1], u[2], u[3]);
#else
    *to = u[0];
#endif
}

#if TYPE
__device__ __forceinline__ Units load(const narrow *from) {
    Units u;
#if VECTOR == 4
    uint2 w = *(const uint2 *)from;
    u[0] = widen((narrow)w.x), u[1] = widen((narrow)(w.x >> 16));
    u[2] = widen((narrow)w.y), u[3] = widen((narrow)(w.y >> 16));
#else
    u[0] = widen(*from);
#endif
    return u;
}

__device__ __forceinline__ void store(narrow *to, const Units &u) {
#if VECTOR == 4
    u32 low = pair(u[0], u[1]), high = pair(u[2], u[3]);
    *(uint2 *)to = make_uint2(low, high);
#else
    *to = narrowed(u[0]);
#endif
}
#endif

__device__ __forceinline__ Units all_of(float value) {
    Units u;
    EACH_UNIT u[e] = value;
    return u;
}

struct Place { /* VECTOR units of one row at one step */
    i64 row, j, length, at, before;
    bool in, cut, first; /* first: the step before is not seen (first step, or a reset) */
};

__device__ __forceinline__ Place place_at(const Loop &l, i64 t, i64 row, i64 j, bool in) {
    Place p;
    p.in = in;
    p.row = row;
    p.j = j;
    p.length = length_of(l, p.row);
    p.in = p.in && t < p.length;
    p.at = row_index(l, t, p.row, p.length);
    p.before = row_index(l, t - 1, p.row, p.length);
    p.cut = p.in && cut_at(l, t, p.row, p.length);
    p.first = t == 0 || p.cut;
    return p;
}

__device__ __forceinline__ Place place(const Loop &l, i64 t, i64 units) {
    u32 across = (u32)units / VECTOR, index = blockIdx.x * blockDim.x + threadIdx.x, row = index / across;
    bool in = row < (u32)l.batch;
    return place_at(l, t, in ? row : 0, (i64)(index - row * across) * VECTOR, in);
}

/* The same if a block processes one row. */
__device__ __forceinline__ Place place_in_row(const Loop &l, i64 t) {
    i64 j = (i64)threadIdx.x * VECTOR;
    return place_at(l, t, blockIdx.x, j, j < l.hidden);
}

struct Words {
    u32 v[VECTOR];
};

/* As `word_of` for all units: one draw makes the words of four adjacent units. */
__device__ __forceinline__ Words words_of(const Stream &s, u64 seed, u32 unit, u32 example, u32 step) {
    u32 word[4];
    unit = s.sees_unit ? unit : 0;
    philox(word, seed, unit >> 2, s.sees_example ? example : 0, s.sees_step ? step : 0, s.plane);
#if VECTOR == 4
    return {word[0], s.sees_unit ? word[1] : word[0], s.sees_unit ? word[2] : word[0], s.sees_unit ? word[3] : word[0]};
#else
    return {unit & 2 ? (unit & 1 ? word[3] : word[2]) : (unit & 1 ? word[1] : word[0])};
#endif
}

