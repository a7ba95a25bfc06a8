/* What a generated step function is given: pointers to one row's numbers, indexed by the unit. Included once per type. */
typedef struct {
    REAL *gate[8];                      /* in: x·W_x, and h·W_h where they are merged; out: what is stored */
    const REAL *r[8];                   /* h·W_h where it stands apart */
    const REAL *bias_x[8], *bias_r[8];
    const REAL *old[4];                 /* the states before the step */
    REAL *new[4];                       /* the states after it */
    const REAL *zone[4], *zero[4];      /* masks of the states: keep the old value; set the candidate to zero */
    const REAL *update, *hold, *held;   /* masks of update and held gate; the held gate of the step before */
    const REAL *parameter[8];
    REAL *slot[2];                      /* what else is stored */
    REAL *raw;                          /* what the norm normalises */
    const REAL *shown;                  /* the norm's result */
    /* the backward pass */
    REAL *dstate[4];                    /* in: gradients of the new states; out: of the old ones */
    const REAL *dy;                     /* gradient of the output, added to that of the new h */
    REAL *owed;                         /* in: gradient of the gate, from the step after; out: of the held gate */
    REAL *dx[8], *dr[8];                /* gradients of x and, apart, of r */
    REAL *dparameter[8];                /* added to */
    REAL *dshown;                       /* gradient of the norm's result */
    const REAL *draw;                   /* gradient of what the norm normalises */
} STEP;

typedef void FUNCTION(const STEP *s, int64_t from, int64_t to);

typedef struct { /* a cell: its sizes and its functions, as definition/c.py describes them */
    int64_t gates, states;
    int64_t apart; /* h·W_h is not simply added to x·W_x */
    int64_t held;  /* the gate that may be held */
    FUNCTION *forward[2], *backward[2], *again[2]; /* with zoneout alone, with all rules of noise */
    FUNCTION *norm_gates, *norm_raw, *norm_shows, *norm_back_shows, *norm_back_gates; /* NULL: no zo.shown */
} CELL;
