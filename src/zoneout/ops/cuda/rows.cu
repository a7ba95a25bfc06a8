/* What is done to the rows of a ragged batch around the loop. At step t row b is there while t < lengths[b].
 *
 * Rows are bytes here, but for those that change their type, taken in words of 1 to 16 of them: the largest that all of
 * their addresses are multiples of.
 */
#define BY_WORD(bytes, take, ...)               \
    ((bytes) == 16  ? take<uint4>(__VA_ARGS__)  \
     : (bytes) == 8 ? take<uint2>(__VA_ARGS__)  \
     : (bytes) == 4 ? take<u32>(__VA_ARGS__)    \
     : (bytes) == 2 ? take<u16>(__VA_ARGS__)    \
                    : take<u8>(__VA_ARGS__))

/* --- from where rows lie to where they are wanted ----------------------------------------------- */

struct Side { /* rows that lie packed where there are `starts`, else one behind the other at every step */
    u8 *at;
    const i64 *starts; /* [steps]: the first packed row of each step */
    i64 step, row; /* bytes from one step, and from one row, to the next */
};

__device__ __forceinline__ u8 *row_of(const Side &s, i64 t, i64 b) {
    return s.at + (s.starts ? s.starts[t] * s.row : t * s.step) + b * s.row;
}

struct Moved {
    Side from, to;
    i64 steps, batch, words, word; /* words of a row, and bytes of a word */
    const i64 *lengths; /* [batch] */
};

template <class Word, class Index>
__device__ __forceinline__ void move_word(const Moved &m, Index at) {
    Index words = (Index)m.words, batch = (Index)m.batch;
    Index row = at / words, word = at % words, t = row / batch, b = row % batch;
    bool there = (i64)t < m.lengths[b];
    if (!there && m.to.starts) return; /* packed rows have no place for it */
    Word value = {};
    if (there) value = ((const Word *)row_of(m.from, t, b))[word];
    ((Word *)row_of(m.to, t, b))[word] = value;
}

template <class Word>
__device__ __forceinline__ void move_one(const Moved &m, i64 at, bool many) {
    if (many)
        move_word<Word, i64>(m, at);
    else /* where a division takes a fraction of the time */
        move_word<Word, u32>(m, (u32)at);
}

/* A thread has one word, so that its neighbours have those beside it, however short the rows are. */
extern "C" __global__ void move(Moved m) {
    i64 all = m.steps * m.batch * m.words, at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < all) BY_WORD(m.word, move_one, m, at, all >> 32);
}

/* --- zero past the ends ------------------------------------------------------------------------- */

#define MOST 7

struct Cleared {
    i64 steps, batch;
    const i64 *lengths; /* [batch] */
    i64 count;
    u8 *at[MOST];
    i64 width[MOST], word[MOST]; /* bytes of a row, and of a word */
};

template <class Word>
__device__ __forceinline__ void zero(u8 *row, i64 width) { /* by a warp */
    for (i64 i = threadIdx.x % 32; i < width / (i64)sizeof(Word); i += 32) ((Word *)row)[i] = Word{};
}

extern "C" __global__ void clear(Cleared c) {
    i64 warps = blockDim.x / 32;
    for (i64 row = blockIdx.x * warps + threadIdx.x / 32; row < c.steps * c.batch; row += gridDim.x * warps) {
        if (row / c.batch < c.lengths[row % c.batch]) continue;
        for (i64 k = 0; k < c.count; k++) BY_WORD(c.word[k], zero, c.at[k] + row * c.width[k], c.width[k]);
    }
}

/* --- the states at the ends --------------------------------------------------------------------- */

struct State {
    const void *every, *initial; /* [steps, batch, width] and [batch, width] */
    narrow *last; /* [batch, width] */
    i64 width, wide; /* whether `every` and `initial` are float, whatever `last` is */
};

struct Ends {
    i64 batch, reverse;
    const i64 *lengths; /* [batch] */
    State states[2];
};

extern "C" __global__ void ends(Ends e) {
    State s = blockIdx.y ? e.states[1] : e.states[0];
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= e.batch * s.width) return;
    i64 length = e.lengths[at / s.width], last = e.reverse ? 0 : length - 1;
    const void *from = length > 0 ? s.every : s.initial;
    i64 i = length > 0 ? last * e.batch * s.width + at : at;
    s.last[at] = s.wide ? narrowed(((const float *)from)[i]) : ((const narrow *)from)[i];
}
