/* plan_nets.h - real nets for tests of plans: their arithmetic in plain C, losses, SGD. One step:
   forward, the loss is the sum of the outputs, backward, descent. The same training runs eagerly
   and with a plan; the test compares losses, shards and gradients bit by bit.

       static nets_job j;
       nets_reset(&j, nets_nested());
       j.desc.bucket_bytes = -1;
       nets_run(&j, 2, 0);                       // two ranks, inline; compares
       CHECK_EQ_INT(j.r[1][0].report.gathers[1], 17);

   Parameters and inputs follow from a hash of the rank. Every unit is read when it is opened, and
   once more before it is closed: nobody may have written over it meanwhile.

   SPDX-License-Identifier: MIT */
#ifndef PLAN_NETS_H
#define PLAN_NETS_H
#include "lab.h"
#include <math.h> /* erf, exp, sqrt */

enum { NETS_UNITS = 5, NETS_PARAMS = 12, NETS_ITERS = 12, NETS_RANKS = 4 };
enum { NETS_VISITS = 12, NETS_TEXT = 1 << 18 };

typedef struct nets_bed nets_bed;

typedef struct nets_unit {
    int num_params, never;         /* never: open around the others */
    int frozen;                    /* bits */
    int64_t shape[NETS_PARAMS][2]; /* a second size of 0: a vector */
} nets_unit;

typedef struct nets_net {
    const char *name;
    int num_units;
    nets_unit unit[NETS_UNITS];
    size_t saved; /* bytes that forward saves for backward */
    double (*forward)(nets_bed *b);
    void (*backward)(nets_bed *b);
    int64_t sizes[5];            /* MLP: widths of the layers' inputs and of the output */
    int layers, per_unit, batch; /* MLP */
    int relu_last;               /* MLP */
    int twice;                   /* each visit opens and closes its unit twice */
    int positive;                /* parameters mostly are: relus stay alive */
    int whole;                   /* nested: one backward pair for each unit, around all visits */
    int recompute, dropout;      /* transformer */
    fsdp_dtype dtype, reduce;    /* dtypes: gathered parameters, reductions */
} nets_net;

typedef struct nets_result {
    double loss[NETS_ITERS];
    uint64_t seen[NETS_ITERS]; /* hash of the parameters that were read */
    uint64_t grads[NETS_ITERS], shards[NETS_ITERS];
    uint64_t states[NETS_ITERS]; /* hash of training states before and after each hook */
    uint64_t draws[NETS_ITERS];  /* hash of the caller's random numbers */
    uint64_t ops[NETS_ITERS];    /* hash of a step's ops; job->watched */
    int num_ops[NETS_ITERS];
    uint64_t allocations[NETS_ITERS];
    fsdp_plan_mode mode[NETS_ITERS]; /* after each step */
    char why[160];
    int count, run, hooks; /* run: FSDP_RUN_*; hooks: calls in a step */
    int64_t slots;         /* bytes of slots, an arena included */
    int64_t gather_bytes;  /* size of the largest gathered slot */
    int in_place;          /* gathers that were found to be where fsdp_data points to */
    fsdp_plan_report report;
} nets_result;

typedef struct nets_job {
    nets_net net;
    fsdp_plan_desc desc;
    int iters;
    int by_hand; /* from iteration 2 on (the other run replays), the eager run reduces a unit only
                    after its last visit */
    int watched; /* ops are logged, and the places where gathers write are checked */
    int passive; /* the plan is paused all the time */
    int size, lanes;
    void (*step)(nets_bed *b, nets_result *out, int it);
    void (*touch)(void *user, int writes, void *ptr, int64_t nbytes); /* called for each access */
    void *touch_user;
    nets_result r[2][NETS_RANKS]; /* eager, planned */
    char text[NETS_TEXT];         /* rank 0's newest plan, with ops */
} nets_job;

struct nets_bed { /* one rank */
    const nets_job *job;
    const nets_net *net;
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *unit[NETS_UNITS];
    fsdp_plan *plan;
    fsdp_sgd *sgd;
    int by_hand, it, hooks;
    double *x[NETS_UNITS][NETS_PARAMS]; /* parameters of open units */
    double *g[NETS_UNITS][NETS_PARAMS]; /* gradients of this visit */
    int touched[NETS_UNITS][NETS_PARAMS], open[NETS_UNITS];
    uint64_t bytes[NETS_UNITS]; /* hash of the parameters, as read when it was opened */
    int visits[NETS_UNITS];     /* backwards that are still to come */
    char *saved;
    uint64_t seen, states, draws, random;
    double nudge; /* added to one parameter */
    int nudge_unit, nudge_param;
    int64_t nudge_at;
    lab_log log;
    int in_place;
};

H_FN int64_t nets_numel(const nets_net *n, int u, int i) {
    const int64_t *s = n->unit[u].shape[i];
    return s[0] * (s[1] ? s[1] : 1);
}
H_FN fsdp_dtype nets_dtype(const nets_net *n) { return n->dtype ? n->dtype : FSDP_F32; }
H_FN int nets_trains(const nets_net *n, int u, int i) { return !(n->unit[u].frozen >> i & 1); }

/* Converts as lab_load does, but faster for float32, which nearly all numbers are. */
H_FN void nets_load(double *to, const void *from, fsdp_dtype dtype, int64_t numel) {
    if (dtype != FSDP_F32) lab_load(to, from, dtype, numel);
    else
        for (int64_t k = 0; k < numel; k++) to[k] = (double)((const float *)from)[k];
}
/* Adds g to `to`, then sets g to zeros. */
H_FN void nets_add(void *to, fsdp_dtype dtype, double *g, int64_t numel) {
    for (int64_t k = 0; k < numel && dtype == FSDP_F32; k++)
        ((float *)to)[k] = (float)((double)((float *)to)[k] + g[k]);
    for (int64_t k = 0; k < numel && dtype != FSDP_F32; k++)
        lab_put(to, dtype, k, lab_get(to, dtype, k) + g[k]);
    memset(g, 0, (size_t)numel * sizeof *g);
}

/* ---- hooks ----------------------------------------------------------------------------------- */

H_FN void nets_touch(nets_bed *b, int writes, const void *ptr, int64_t numel) {
    if (b->job->touch && numel)
        b->job->touch(b->job->touch_user, writes, (void *)(uintptr_t)ptr,
                      numel * (int64_t)fsdp_dtype_size(nets_dtype(b->net)));
}
H_FN uint64_t nets_read(nets_bed *b, int u) {
    uint64_t hash = 1;
    for (int i = 0; i < b->net->unit[u].num_params; i++) {
        const void *data = fsdp_data(b->unit[u], i);
        const int64_t numel = nets_numel(b->net, u, i);
        CHECK(data || !numel);
        nets_touch(b, 0, data, numel);
        lab_fold_fast(&hash, data, (size_t)numel * fsdp_dtype_size(nets_dtype(b->net)));
    }
    return hash;
}

/* Checks that the unit's newest gather wrote the slot that fsdp_data points into, and that the
   parameters of open units do not overlap. */
H_FN void nets_check_places(nets_bed *b, int u) {
    const size_t size = fsdp_dtype_size(nets_dtype(b->net));
    int last = -1;
    for (int n = 0;
         (n = lab_next_op(&b->log, n, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, b->unit[u])) >= 0; n++)
        last = n;
    for (int i = 0; i < b->net->unit[u].num_params; i++) {
        const char *data = (const char *)fsdp_data(b->unit[u], i);
        const char *end = data + (size_t)nets_numel(b->net, u, i) * size;
        if (last >= 0) {
            const char *slot = (const char *)fsdp_buf_ptr(b->log.ops[last].dst);
            CHECK(data >= slot && end <= slot + fsdp_buf_nbytes(b->log.ops[last].dst));
            b->in_place++;
        }
        for (int v = 0; v < b->net->num_units; v++)
            for (int k = 0; k < b->net->unit[v].num_params && (b->open[v] || v == u); k++) {
                const char *other = (const char *)fsdp_data(b->unit[v], k);
                if (v == u && k == i) continue;
                CHECK(data >= other + (size_t)nets_numel(b->net, v, k) * size || other >= end);
            }
    }
}

H_FN void nets_say_state(nets_bed *b, int u) {
    const unsigned char state = (unsigned char)fsdp_unit_state(b->unit[u]);
    lab_fold(&b->states, &state, 1);
}

H_FN void nets_hook(nets_bed *b, int u, int call) {
    static fsdp_status (*const calls[])(fsdp_unit *) = {fsdp_pre_forward, fsdp_post_forward,
                                                        fsdp_pre_backward, fsdp_post_backward};
    static const fsdp_training_state then[] = {FSDP_STATE_FORWARD, FSDP_STATE_IDLE,
                                               FSDP_STATE_PRE_BACKWARD, FSDP_STATE_POST_BACKWARD};
    const int again = fsdp_unit_state(b->unit[u]) == FSDP_STATE_PRE_BACKWARD;
    b->hooks++;
    nets_say_state(b, u);
    CALL(b->w, calls[call](b->unit[u]));
    nets_say_state(b, u);
    if (again && call < FSDP_CALL_PRE_BACKWARD) call = FSDP_CALL_PRE_BACKWARD; /* recompute */
    CHECK_EQ_INT(fsdp_unit_state(b->unit[u]), then[call]);
}

H_FN void nets_open_unit(nets_bed *b, int u, int backward) {
    const nets_net *n = b->net;
    if (backward && b->by_hand && b->it >= 2)
        CALL(b->w, fsdp_set_requires_gradient_sync(b->m, b->unit[u], b->visits[u] == 1));
    if (backward) b->visits[u]--;
    nets_hook(b, u, backward ? FSDP_CALL_PRE_BACKWARD : FSDP_CALL_PRE_FORWARD);
    for (int i = 0; i < n->unit[u].num_params; i++) {
        const int64_t numel = nets_numel(n, u, i);
        if (numel) nets_load(b->x[u][i], fsdp_data(b->unit[u], i), nets_dtype(n), numel);
        if (b->nudge_unit == u && b->nudge_param == i) b->x[u][i][b->nudge_at] += b->nudge;
    }
    b->bytes[u] = nets_read(b, u);
    lab_fold_fast(&b->seen, &b->bytes[u], sizeof b->bytes[u]);
    if (b->job->watched) nets_check_places(b, u);
    b->open[u] = 1;
}

H_FN void nets_close_unit(nets_bed *b, int u, int backward) {
    const nets_net *n = b->net;
    CHECK(nets_read(b, u) == b->bytes[u]);
    for (int i = 0; i < n->unit[u].num_params && backward; i++) {
        const int64_t numel = nets_numel(n, u, i);
        if (!b->touched[u][i] || !nets_trains(n, u, i)) continue;
        void *grad = fsdp_grad(b->unit[u], i);
        CHECK(grad != NULL || !numel);
        nets_add(grad, nets_dtype(n), b->g[u][i], numel);
        nets_touch(b, 1, grad, numel);
        b->touched[u][i] = 0;
    }
    nets_hook(b, u, backward ? FSDP_CALL_POST_BACKWARD : FSDP_CALL_POST_FORWARD);
    b->open[u] = 0;
}
/* Returns the memory in which the caller adds up the gradient of a parameter. */
H_FN double *nets_grad(nets_bed *b, int u, int i) {
    CHECK(b->open[u]);
    b->touched[u][i] = 1;
    return b->g[u][i];
}
H_FN double nets_random(nets_bed *b) { /* the caller's own numbers */
    const double x = lab_uniform(&b->random);
    lab_fold(&b->draws, &x, sizeof x);
    return x;
}
/* An input, by rank. */
H_FN double nets_input(const nets_bed *b, int64_t k) {
    return (double)(lab_hash(11, (uint64_t)fsdp_rank(b->w), (uint64_t)b->it, (uint64_t)k) % 2001) /
               1000 -
           1;
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

/* y[r][o] = sum of x[r][i] w[o][i], and b[o] */
H_FN void nets_linear(const double *x, const double *w, const double *bias, double *y, int64_t rows,
                      int64_t in, int64_t out) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < out; o++) {
            double sum = bias ? bias[o] : 0;
            for (int64_t i = 0; i < in; i++) sum += x[r * in + i] * w[o * in + i];
            y[r * out + o] = sum;
        }
}
/* Adds to dx, dw and db, which may be NULL. */
H_FN void nets_linear_back(const double *x, const double *w, const double *dy, double *dx,
                           double *dw, double *db, int64_t rows, int64_t in, int64_t out) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < out; o++) {
            const double d = dy[r * out + o];
            if (db) db[o] += d;
            for (int64_t i = 0; i < in && dw; i++) dw[o * in + i] += d * x[r * in + i];
            for (int64_t i = 0; i < in && dx; i++) dx[r * in + i] += d * w[o * in + i];
        }
}

/* ---- MLP: unit k has layers k * per_unit and so on, each a weight and a bias ------------------ */

H_FN double *nets_mlp_at(nets_bed *b, int l) { /* input of layer l; the output */
    double *at = (double *)(void *)b->saved;
    for (int i = 0; i < l; i++) at += b->net->sizes[i] * b->net->batch;
    return at;
}
H_FN double nets_mlp_forward(nets_bed *b) {
    const nets_net *n = b->net;
    double loss = 0, *x = nets_mlp_at(b, 0);
    for (int64_t k = 0; k < n->sizes[0] * n->batch; k++) x[k] = nets_input(b, k);
    for (int l = 0; l < n->layers; l++) {
        const int u = l / n->per_unit, i = 2 * (l % n->per_unit);
        double *y = nets_mlp_at(b, l + 1);
        if (i == 0) nets_open_unit(b, u, 0);
        nets_linear(nets_mlp_at(b, l), b->x[u][i], b->x[u][i + 1], y, n->batch, n->sizes[l],
                    n->sizes[l + 1]);
        for (int64_t k = 0; k < n->sizes[l + 1] * n->batch; k++) {
            if (y[k] < 0 && (l + 1 < n->layers || n->relu_last)) y[k] = 0;
            if (l + 1 == n->layers) loss += y[k];
        }
        if (i / 2 + 1 == n->per_unit) nets_close_unit(b, u, 0);
    }
    return loss;
}
H_FN void nets_mlp_backward(nets_bed *b) {
    const nets_net *n = b->net;
    double *dy = lab_doubles(n->sizes[n->layers] * n->batch);
    for (int64_t k = 0; k < n->sizes[n->layers] * n->batch; k++) dy[k] = 1;
    for (int l = n->layers - 1; l >= 0; l--) {
        const int u = l / n->per_unit, i = 2 * (l % n->per_unit);
        const double *y = nets_mlp_at(b, l + 1);
        double *dx = lab_doubles(n->sizes[l] * n->batch);
        if (i / 2 + 1 == n->per_unit) nets_open_unit(b, u, 1);
        for (int64_t k = 0; k < n->sizes[l + 1] * n->batch; k++)
            if (y[k] <= 0 && (l + 1 < n->layers || n->relu_last)) dy[k] = 0;
        nets_linear_back(nets_mlp_at(b, l), b->x[u][i], dy, l ? dx : NULL, nets_grad(b, u, i),
                         nets_grad(b, u, i + 1), n->batch, n->sizes[l], n->sizes[l + 1]);
        if (i == 0) nets_close_unit(b, u, 1);
        free(dy);
        dy = dx;
    }
    free(dy);
}
H_FN nets_net nets_mlp(const char *name, const int64_t *sizes, int layers, int per_unit,
                       int batch) {
    nets_net n;
    memset(&n, 0, sizeof n);
    n.name = name;
    n.layers = layers, n.per_unit = per_unit, n.batch = batch;
    n.num_units = layers / per_unit;
    for (int l = 0; l <= layers; l++) {
        n.sizes[l] = sizes[l];
        n.saved += (size_t)(sizes[l] * batch) * sizeof(double);
    }
    for (int l = 0; l < layers; l++) {
        nets_unit *u = &n.unit[l / per_unit];
        u->shape[u->num_params][0] = sizes[l + 1];
        u->shape[u->num_params++][1] = sizes[l];
        u->shape[u->num_params++][0] = sizes[l + 1];
    }
    n.forward = nets_mlp_forward, n.backward = nets_mlp_backward;
    return n;
}
/* Three linear layers of 16 in one unit. */
H_FN nets_net nets_simple_mlp(void) {
    static const int64_t sizes[4] = {16, 16, 16, 16};
    return nets_mlp("simple_mlp", sizes, 3, 3, 2);
}

/* ---- nested: relu((x @ param1) * param2), three layers, used twelve times --------------------- */

static const int nets_order[NETS_VISITS] = {0, 0, 1, 1, 2, 2, 0, 1, 2, 0, 1, 2};
enum { NETS_DIM = 16, NETS_ROWS = 2, NETS_X = NETS_ROWS * NETS_DIM };

typedef struct nets_visit {
    double x[NETS_X], z[NETS_X];
} nets_visit;

H_FN double nets_nested_forward(nets_bed *b) {
    nets_visit *v = (nets_visit *)(void *)b->saved;
    double loss = 0;
    for (int k = 0; k < NETS_X; k++) v->x[k] = nets_input(b, k);
    for (int i = 0; i < NETS_VISITS; i++, v++) {
        const int u = nets_order[i];
        nets_open_unit(b, u, 0);
        for (int k = 0; k < NETS_X; k++) {
            v->z[k] = 0;
            for (int j = 0; j < NETS_DIM; j++)
                v->z[k] += v->x[k / NETS_DIM * NETS_DIM + j] *
                           b->x[u][0][j * NETS_DIM + k % NETS_DIM];
        }
        if (b->net->twice) nets_close_unit(b, u, 0), nets_open_unit(b, u, 0);
        for (int k = 0; k < NETS_X; k++) {
            const double y = v->z[k] * b->x[u][1][k % NETS_DIM];
            v[1].x[k] = y > 0 ? y : 0;
        }
        nets_close_unit(b, u, 0);
    }
    for (int k = 0; k < NETS_X; k++) loss += v->x[k];
    return loss;
}
H_FN void nets_nested_backward(nets_bed *b) {
    nets_visit *v = (nets_visit *)(void *)b->saved + NETS_VISITS - 1;
    double dy[NETS_X], dz[NETS_X];
    for (int k = 0; k < NETS_X; k++) dy[k] = 1;
    for (int i = NETS_VISITS - 1; i >= 0; i--, v--) {
        const int u = nets_order[i], last = i == 2 * u; /* the layer's first visit */
        if (!b->net->whole || !b->open[u]) nets_open_unit(b, u, 1);
        double *g2 = nets_grad(b, u, 1);
        for (int k = 0; k < NETS_X; k++) {
            const double d = v[1].x[k] > 0 ? dy[k] : 0;
            g2[k % NETS_DIM] += d * v->z[k];
            dz[k] = d * b->x[u][1][k % NETS_DIM];
            dy[k] = 0;
        }
        if (b->net->twice) nets_close_unit(b, u, 1), nets_open_unit(b, u, 1);
        double *g1 = nets_grad(b, u, 0);
        for (int k = 0; k < NETS_X; k++)
            for (int j = 0; j < NETS_DIM; j++) {
                const int from = k / NETS_DIM * NETS_DIM + j, at = j * NETS_DIM + k % NETS_DIM;
                g1[at] += v->x[from] * dz[k];
                dy[from] += dz[k] * b->x[u][0][at];
            }
        if (!b->net->whole || last) nets_close_unit(b, u, 1);
    }
}
H_FN nets_net nets_nested(void) {
    nets_net n;
    memset(&n, 0, sizeof n);
    n.name = "nested";
    n.positive = 1;
    n.num_units = 3;
    n.saved = (NETS_VISITS + 1) * sizeof(nets_visit);
    for (int u = 0; u < 3; u++) {
        n.unit[u].num_params = 2;
        n.unit[u].shape[0][0] = n.unit[u].shape[0][1] = n.unit[u].shape[1][0] = NETS_DIM;
    }
    n.forward = nets_nested_forward, n.backward = nets_nested_backward;
    return n;
}

/* ---- transformer ------------------------------------------------------------------------------ */

/* Pre-norm layers with causal attention, a tied output. Unit 0 is the root. */
enum { NETS_VOCAB = 8, NETS_SEQ = 16, NETS_HEADS = 4, NETS_LAYERS = 3 };
enum { NETS_TOKENS = NETS_ROWS * NETS_SEQ, NETS_WIDE = 4 * NETS_DIM, NETS_HEAD = 4 };
enum { NETS_WQ, NETS_WK, NETS_WV, NETS_WO, NETS_N1W, NETS_N1B, NETS_N2W, NETS_N2B };
enum { NETS_F1W = 8, NETS_F1B, NETS_F2W, NETS_F2B };
enum { NETS_EMB, NETS_POS, NETS_FW, NETS_FB };
enum { NETS_H = NETS_TOKENS * NETS_DIM, NETS_F = NETS_TOKENS * NETS_WIDE };
static const double nets_dropped = 0.1;

typedef struct nets_norm {
    double hat[NETS_H], inv[NETS_TOKENS], y[NETS_H];
} nets_norm;
typedef struct nets_layer {
    double x[NETS_H];
    nets_norm n1, n2;
    double q[NETS_H], k[NETS_H], v[NETS_H], o[NETS_H], h[NETS_H], f[NETS_F], a[NETS_F];
    double p[NETS_ROWS][NETS_HEADS][NETS_SEQ][NETS_SEQ];
    double mask[NETS_H]; /* dropout: 0, or the factor that keeps the mean */
} nets_layer;
typedef struct nets_former {
    nets_layer layer[NETS_LAYERS + 1]; /* the last entry has only x */
    nets_norm norm;
    int token[NETS_TOKENS];
} nets_former;

H_FN void nets_norm_forward(nets_norm *n, const double *x, const double *w, const double *bias) {
    for (int t = 0; t < NETS_TOKENS; t++) {
        double mean = 0, var = 0;
        for (int d = 0; d < NETS_DIM; d++) mean += x[t * NETS_DIM + d] / NETS_DIM;
        for (int d = 0; d < NETS_DIM; d++) {
            const double c = x[t * NETS_DIM + d] - mean;
            var += c * c / NETS_DIM;
        }
        n->inv[t] = 1 / sqrt(var + 1e-5);
        for (int d = 0; d < NETS_DIM; d++) {
            const int k = t * NETS_DIM + d;
            n->hat[k] = (x[k] - mean) * n->inv[t];
            n->y[k] = n->hat[k] * w[d] + bias[d];
        }
    }
}
/* Adds to dx. */
H_FN void nets_norm_backward(const nets_norm *n, const double *w, const double *dy, double *dx,
                             double *dw, double *db) {
    for (int t = 0; t < NETS_TOKENS; t++) {
        double mean = 0, dot = 0;
        for (int d = 0; d < NETS_DIM; d++) {
            const int k = t * NETS_DIM + d;
            mean += dy[k] * w[d] / NETS_DIM;
            dot += dy[k] * w[d] * n->hat[k] / NETS_DIM;
            dw[d] += dy[k] * n->hat[k];
            db[d] += dy[k];
        }
        for (int d = 0; d < NETS_DIM; d++) {
            const int k = t * NETS_DIM + d;
            dx[k] += (dy[k] * w[d] - mean - n->hat[k] * dot) * n->inv[t];
        }
    }
}

H_FN void nets_attend(nets_layer *y) {
    memset(y->o, 0, sizeof y->o);
    for (int r = 0; r < NETS_ROWS; r++)
        for (int h = 0; h < NETS_HEADS; h++)
            for (int i = 0; i < NETS_SEQ; i++) {
                double *p = y->p[r][h][i], sum = 0;
                const int qi = (r * NETS_SEQ + i) * NETS_DIM + h * NETS_HEAD;
                for (int j = 0; j <= i; j++) {
                    const int kj = (r * NETS_SEQ + j) * NETS_DIM + h * NETS_HEAD;
                    double dot = 0;
                    for (int d = 0; d < NETS_HEAD; d++) dot += y->q[qi + d] * y->k[kj + d];
                    p[j] = exp(dot / sqrt(NETS_HEAD));
                    sum += p[j];
                }
                for (int j = 0; j <= i; j++) {
                    const int kj = (r * NETS_SEQ + j) * NETS_DIM + h * NETS_HEAD;
                    p[j] /= sum;
                    for (int d = 0; d < NETS_HEAD; d++) y->o[qi + d] += p[j] * y->v[kj + d];
                }
            }
}
H_FN void nets_attend_back(const nets_layer *y, const double *d_o, double *dq, double *dk,
                           double *dv) {
    for (int r = 0; r < NETS_ROWS; r++)
        for (int h = 0; h < NETS_HEADS; h++)
            for (int i = 0; i < NETS_SEQ; i++) {
                const double *p = y->p[r][h][i];
                const int qi = (r * NETS_SEQ + i) * NETS_DIM + h * NETS_HEAD;
                double dp[NETS_SEQ], dot = 0;
                for (int j = 0; j <= i; j++) {
                    const int kj = (r * NETS_SEQ + j) * NETS_DIM + h * NETS_HEAD;
                    dp[j] = 0;
                    for (int d = 0; d < NETS_HEAD; d++) {
                        dp[j] += d_o[qi + d] * y->v[kj + d];
                        dv[kj + d] += p[j] * d_o[qi + d];
                    }
                    dot += dp[j] * p[j];
                }
                for (int j = 0; j <= i; j++) {
                    const int kj = (r * NETS_SEQ + j) * NETS_DIM + h * NETS_HEAD;
                    const double ds = p[j] * (dp[j] - dot) / sqrt(NETS_HEAD);
                    for (int d = 0; d < NETS_HEAD; d++) {
                        dq[qi + d] += ds * y->k[kj + d];
                        dk[kj + d] += ds * y->q[qi + d];
                    }
                }
            }
}

/* Computes a layer up to attention; nets_layer_end computes the rest after attention. */
H_FN void nets_layer_begin(nets_bed *b, nets_layer *y, int u) {
    double *const *x = b->x[u];
    nets_norm_forward(&y->n1, y->x, x[NETS_N1W], x[NETS_N1B]);
    nets_linear(y->n1.y, x[NETS_WQ], NULL, y->q, NETS_TOKENS, NETS_DIM, NETS_DIM);
    nets_linear(y->n1.y, x[NETS_WK], NULL, y->k, NETS_TOKENS, NETS_DIM, NETS_DIM);
    nets_linear(y->n1.y, x[NETS_WV], NULL, y->v, NETS_TOKENS, NETS_DIM, NETS_DIM);
}
H_FN void nets_layer_end(nets_bed *b, nets_layer *y, int u, double *out) {
    double *const *x = b->x[u];
    nets_linear(y->o, x[NETS_WO], NULL, y->h, NETS_TOKENS, NETS_DIM, NETS_DIM);
    for (int k = 0; k < NETS_H; k++) y->h[k] = y->h[k] * y->mask[k] + y->x[k];
    nets_norm_forward(&y->n2, y->h, x[NETS_N2W], x[NETS_N2B]);
    nets_linear(y->n2.y, x[NETS_F1W], x[NETS_F1B], y->f, NETS_TOKENS, NETS_DIM, NETS_WIDE);
    for (int k = 0; k < NETS_F; k++)
        y->a[k] = 0.5 * y->f[k] * (1 + erf(y->f[k] * 0.70710678118654752));
    nets_linear(y->a, x[NETS_F2W], x[NETS_F2B], out, NETS_TOKENS, NETS_WIDE, NETS_DIM);
    for (int k = 0; k < NETS_H; k++) out[k] += y->h[k];
}

H_FN double nets_former_forward(nets_bed *b) {
    nets_former *f = (nets_former *)(void *)b->saved;
    double loss = 0;
    nets_open_unit(b, 0, 0);
    for (int t = 0; t < NETS_TOKENS; t++) {
        f->token[t] = (int)(lab_hash(13, (uint64_t)fsdp_rank(b->w), (uint64_t)b->it, (uint64_t)t) %
                            NETS_VOCAB);
        for (int d = 0; d < NETS_DIM; d++)
            f->layer[0].x[t * NETS_DIM + d] = b->x[0][NETS_EMB][f->token[t] * NETS_DIM + d] +
                                              b->x[0][NETS_POS][t % NETS_SEQ * NETS_DIM + d];
    }
    for (int l = 0; l < NETS_LAYERS; l++) {
        nets_layer *y = &f->layer[l];
        nets_open_unit(b, l + 1, 0);
        nets_layer_begin(b, y, l + 1);
        if (b->net->twice) nets_close_unit(b, l + 1, 0);
        nets_attend(y);
        for (int k = 0; k < NETS_H; k++)
            y->mask[k] = !b->net->dropout                ? 1
                         : nets_random(b) < nets_dropped ? 0
                                                         : 1 / (1 - nets_dropped);
        if (b->net->twice) nets_open_unit(b, l + 1, 0);
        nets_layer_end(b, y, l + 1, f->layer[l + 1].x);
        nets_close_unit(b, l + 1, 0);
        if (!b->net->recompute) continue;
        for (int k = 0; k < NETS_H; k++) y->q[k] = y->h[k] = y->n2.hat[k] = LAB_NAN;
    }
    nets_norm_forward(&f->norm, f->layer[NETS_LAYERS].x, b->x[0][NETS_FW], b->x[0][NETS_FB]);
    for (int t = 0; t < NETS_TOKENS; t++)
        for (int v = 0; v < NETS_VOCAB; v++)
            for (int d = 0; d < NETS_DIM; d++)
                loss += f->norm.y[t * NETS_DIM + d] * b->x[0][NETS_EMB][v * NETS_DIM + d];
    nets_close_unit(b, 0, 0);
    return loss;
}

/* dy becomes the gradient of the layer's input. */
H_FN void nets_layer_backward(nets_bed *b, nets_layer *y, int u, double *dy) {
    double *da = lab_doubles(NETS_F), *d = lab_doubles(6 * (int64_t)NETS_H), *dq = d + NETS_H;
    double *dk = dq + NETS_H, *dv = dk + NETS_H, *d_o = dv + NETS_H, *dn = d_o + NETS_H;
    double *out = lab_doubles(NETS_H);
    nets_open_unit(b, u, 1);
    double *const *x = b->x[u];
    if (b->net->recompute) { /* during backward: the unit is open */
        nets_hook(b, u, FSDP_CALL_PRE_FORWARD);
        nets_layer_begin(b, y, u);
        nets_attend(y);
        nets_layer_end(b, y, u, out);
        nets_hook(b, u, FSDP_CALL_POST_FORWARD);
    }
    nets_linear_back(y->a, x[NETS_F2W], dy, da, nets_grad(b, u, NETS_F2W),
                     nets_grad(b, u, NETS_F2B), NETS_TOKENS, NETS_WIDE, NETS_DIM);
    for (int k = 0; k < NETS_F; k++)
        da[k] *= 0.5 * (1 + erf(y->f[k] * 0.70710678118654752)) +
                 y->f[k] * exp(-y->f[k] * y->f[k] / 2) * 0.39894228040143268;
    nets_linear_back(y->n2.y, x[NETS_F1W], da, dn, nets_grad(b, u, NETS_F1W),
                     nets_grad(b, u, NETS_F1B), NETS_TOKENS, NETS_DIM, NETS_WIDE);
    nets_norm_backward(&y->n2, x[NETS_N2W], dn, dy, nets_grad(b, u, NETS_N2W),
                       nets_grad(b, u, NETS_N2B));
    for (int k = 0; k < NETS_H; k++) d[k] = dy[k] * y->mask[k], dn[k] = 0;
    nets_linear_back(y->o, x[NETS_WO], d, d_o, nets_grad(b, u, NETS_WO), NULL, NETS_TOKENS,
                     NETS_DIM, NETS_DIM);
    if (b->net->twice) nets_close_unit(b, u, 1);
    nets_attend_back(y, d_o, dq, dk, dv);
    if (b->net->twice) nets_open_unit(b, u, 1);
    nets_linear_back(y->n1.y, x[NETS_WQ], dq, dn, nets_grad(b, u, NETS_WQ), NULL, NETS_TOKENS,
                     NETS_DIM, NETS_DIM);
    nets_linear_back(y->n1.y, x[NETS_WK], dk, dn, nets_grad(b, u, NETS_WK), NULL, NETS_TOKENS,
                     NETS_DIM, NETS_DIM);
    nets_linear_back(y->n1.y, x[NETS_WV], dv, dn, nets_grad(b, u, NETS_WV), NULL, NETS_TOKENS,
                     NETS_DIM, NETS_DIM);
    nets_norm_backward(&y->n1, x[NETS_N1W], dn, dy, nets_grad(b, u, NETS_N1W),
                       nets_grad(b, u, NETS_N1B));
    nets_close_unit(b, u, 1);
    free(da);
    free(d);
    free(out);
}

H_FN void nets_former_backward(nets_bed *b) {
    nets_former *f = (nets_former *)(void *)b->saved;
    double *dy = lab_doubles(NETS_H), *dn = lab_doubles(NETS_H);
    nets_open_unit(b, 0, 1);
    double *emb = nets_grad(b, 0, NETS_EMB), *pos = nets_grad(b, 0, NETS_POS);
    for (int t = 0; t < NETS_TOKENS; t++)
        for (int v = 0; v < NETS_VOCAB; v++)
            for (int d = 0; d < NETS_DIM; d++) {
                dn[t * NETS_DIM + d] += b->x[0][NETS_EMB][v * NETS_DIM + d];
                emb[v * NETS_DIM + d] += f->norm.y[t * NETS_DIM + d];
            }
    nets_norm_backward(&f->norm, b->x[0][NETS_FW], dn, dy, nets_grad(b, 0, NETS_FW),
                       nets_grad(b, 0, NETS_FB));
    for (int l = NETS_LAYERS - 1; l >= 0; l--) nets_layer_backward(b, &f->layer[l], l + 1, dy);
    for (int t = 0; t < NETS_TOKENS; t++)
        for (int d = 0; d < NETS_DIM; d++) {
            emb[f->token[t] * NETS_DIM + d] += dy[t * NETS_DIM + d];
            pos[t % NETS_SEQ * NETS_DIM + d] += dy[t * NETS_DIM + d];
        }
    nets_close_unit(b, 0, 1);
    free(dy);
    free(dn);
}

/* Returns the net. trains == 0: all parameters are frozen except wv of each layer. */
H_FN nets_net nets_transformer(int trains, int recompute) {
    static const int64_t root[4][2] = {
        {NETS_VOCAB, NETS_DIM}, {NETS_SEQ, NETS_DIM}, {NETS_DIM, 0}, {NETS_DIM, 0}};
    static const int64_t layer[12][2] = {
        {NETS_DIM, NETS_DIM},  {NETS_DIM, NETS_DIM}, {NETS_DIM, NETS_DIM},  {NETS_DIM, NETS_DIM},
        {NETS_DIM, 0},         {NETS_DIM, 0},        {NETS_DIM, 0},         {NETS_DIM, 0},
        {NETS_WIDE, NETS_DIM}, {NETS_WIDE, 0},       {NETS_DIM, NETS_WIDE}, {NETS_DIM, 0}};
    nets_net n;
    memset(&n, 0, sizeof n);
    n.name = "transformer";
    n.num_units = 1 + NETS_LAYERS;
    n.saved = sizeof(nets_former);
    n.recompute = recompute;
    n.unit[0].num_params = 4, n.unit[0].never = 1;
    n.unit[0].frozen = trains ? 0 : 0xf;
    memcpy(n.unit[0].shape, root, sizeof root);
    for (int l = 1; l <= NETS_LAYERS; l++) {
        n.unit[l].num_params = 12;
        n.unit[l].frozen = trains ? 0 : 0xfff & ~(1 << NETS_WV);
        memcpy(n.unit[l].shape, layer, sizeof layer);
    }
    n.forward = nets_former_forward, n.backward = nets_former_backward;
    return n;
}

/* ---- training ---------------------------------------------------------------------------------- */

/* Fills a parameter with numbers around the middle that keeps a net alive: 1 for norms' weights, 0
   for other parameters, and a positive one if the net sets `positive` (its relus stay alive). */
H_FN void nets_fill(void *user, const fsdp_param_view *v) {
    const nets_bed *b = (const nets_bed *)user;
    double middle = 0, around = v->ndim == 1 ? 0.1 : 1.5 / sqrt((double)v->shape[1] + 1);
    if (b->net->positive) middle = v->ndim == 1 ? 0.6 : 0.15, around = 0.3;
    if (v->ndim == 1 && b->net->forward == nets_former_forward) {
        const int i = v->index, root = v->unit == b->unit[0];
        middle = root ? i == NETS_FW : i == NETS_N1W || i == NETS_N2W;
    }
    for (int64_t k = 0; k < v->numel; k++) {
        const uint64_t h = lab_hash(7 + (uint64_t)fsdp_rank(b->w), (uint64_t)v->ordinal,
                                    (uint64_t)k, 3);
        ((float *)v->data)[k] = (float)(middle + around * ((double)(h % 2001) / 1000 - 1));
    }
}

H_FN void nets_begin(nets_bed *b, const nets_job *j, fsdp_world *w) {
    const nets_net *n = &j->net;
    fsdp_model_desc md = FSDP_ZERO;
    memset(b, 0, sizeof *b);
    b->job = j, b->net = n, b->w = w, b->nudge_unit = -1;
    md.param_dtype = n->dtype, md.reduce_dtype = n->reduce;
    CALL(w, fsdp_model_create(w, &md, &b->m));
    for (int u = 0; u < n->num_units; u++) {
        fsdp_param_desc p[NETS_PARAMS];
        fsdp_unit_desc ud = FSDP_ZERO;
        char name[16];
        snprintf(name, sizeof name, n->unit[u].never ? "root" : "h.%d", u);
        for (int i = 0; i < n->unit[u].num_params; i++) {
            const int64_t *s = n->unit[u].shape[i];
            p[i] = s[1] ? fsdp_mat(NULL, s[0], s[1]) : fsdp_vec(NULL, s[0]);
            p[i].frozen = !nets_trains(n, u, i);
            b->x[u][i] = lab_doubles(nets_numel(n, u, i));
            b->g[u][i] = lab_doubles(nets_numel(n, u, i));
        }
        ud.name = name, ud.params = p, ud.num_params = n->unit[u].num_params;
        if (n->unit[u].never) ud.reshard_after_forward = FSDP_RESHARD_NEVER;
        CALL(w, fsdp_fully_shard(b->m, &ud, &b->unit[u]));
    }
    b->saved = (char *)lab_zeros(n->saved, 1);
    CALL(w, fsdp_init_params(b->m, nets_fill, b));
    CALL(w, fsdp_sgd_create(b->m, NULL, &b->sgd));
}
H_FN void nets_end(nets_bed *b) {
    fsdp_sgd_destroy(b->sgd);
    fsdp_model_destroy(b->m);
    for (int u = 0; u < NETS_UNITS; u++)
        for (int i = 0; i < NETS_PARAMS; i++) free(b->x[u][i]), free(b->g[u][i]);
    free(b->saved);
    free(b->log.ops);
}

/* Adds the ops from index `from` on to *hash and *count, without hooks, and without fields that
   depend on the place of a slot. */
H_FN void nets_fold_ops(nets_bed *b, int from, uint64_t *hash, int *count) {
    for (int i = from; i < b->log.num; i++) {
        const fsdp_op *op = &b->log.ops[i];
        const uint64_t words[] = {op->kind,  op->label,     op->stream, op->dtype,
                                  op->count, op->out_dtype, op->bytes,  op->accumulate,
                                  op->state, op->redop,     op->step,   lab_bits(op->scale)};
        if (op->kind == FSDP_OP_HOOK) continue;
        lab_fold_fast(hash, words, sizeof words);
        if (op->unit) lab_fold(hash, fsdp_unit_name(op->unit), strlen(fsdp_unit_name(op->unit)));
        ++*count;
    }
}

/* Forward, backward, descent. */
H_FN void nets_step(nets_bed *b, nets_result *out, int it) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_counters before, after;
    b->it = it;
    b->hooks = 0;
    b->random = 1000 + (uint64_t)it;
    for (int i = 0; i < NETS_VISITS; i++) b->visits[i % 3] = NETS_VISITS / 3;
    const int from = b->log.num;
    CALL(b->w, fsdp_model_counters(b->m, &before));
    out->loss[it] = b->net->forward(b);
    b->net->backward(b);
    CALL(b->w, fsdp_finalize_backward(b->m));
    CALL(b->w, fsdp_model_counters(b->m, &after));
    out->allocations[it] = after.allocations - before.allocations;
    out->hooks = b->hooks;
    out->num_ops[it] = 0;
    nets_fold_ops(b, from, &out->ops[it], &out->num_ops[it]);
    out->grads[it] = out->shards[it] = 1;
    while (fsdp_next_param(b->m, &v)) {
        CHECK((v.shard_grad != NULL) == (v.requires_grad && v.numel > 0) || !v.numel);
        if (v.shard_grad)
            lab_fold_fast(&out->grads[it], v.shard_grad,
                          (size_t)v.numel * fsdp_dtype_size(v.grad_dtype));
    }
    CALL(b->w, fsdp_sgd_step(b->sgd, 1e-4));
    CALL(b->w, fsdp_zero_grad(b->m));
    memset(&v, 0, sizeof v);
    while (fsdp_next_param(b->m, &v))
        lab_fold_fast(&out->shards[it], v.shard, (size_t)v.numel * fsdp_dtype_size(v.dtype));
    for (int u = 0; u < b->net->num_units; u++) nets_say_state(b, u);
    out->seen[it] = b->seen, out->states[it] = b->states, out->draws[it] = b->draws;
    out->mode[it] = b->plan ? fsdp_plan_state(b->plan) : FSDP_PLAN_MODE_COUNT;
    if (b->plan && fsdp_plan_why(b->plan)[0])
        snprintf(out->why, sizeof out->why, "%s", fsdp_plan_why(b->plan));
}

/* Returns the bytes of all slots except scratch, an arena included. */
H_FN int64_t nets_slot_bytes(const nets_bed *b) {
    fsdp_memory mem;
    int64_t bytes = 0;
    CALL(b->w, fsdp_model_memory(b->m, &mem));
    for (int pool = FSDP_POOL_GATHER; pool < FSDP_POOL_MAX; pool++)
        if (pool != FSDP_POOL_SCRATCH) bytes += mem.pool_bytes[pool];
    return bytes;
}

/* Sets the figures of *out that are known after the training, and `text` if it is not NULL. */
H_FN void nets_numbers(nets_bed *b, nets_result *out, char *text) {
    fsdp_memory mem;
    out->slots = nets_slot_bytes(b);
    for (int u = 0; u < b->net->num_units; u++) {
        CALL(b->w, fsdp_unit_memory(b->unit[u], &mem));
        if (mem.pool_bytes[FSDP_POOL_GATHER] > out->gather_bytes)
            out->gather_bytes = mem.pool_bytes[FSDP_POOL_GATHER];
    }
    out->run = fsdp_model_run_mode(b->m);
    out->in_place = b->in_place;
    out->count = fsdp_plan_count(b->plan);
    if (!out->count) return;
    CALL(b->w, fsdp_plan_report_get(b->plan, out->count - 1, &out->report));
    const size_t length = fsdp_plan_text(b->plan, out->count - 1, FSDP_PLAN_TEXT_OPS, NULL, 0);
    CHECK(length > 0 && length < NETS_TEXT);
    if (text)
        CHECK_EQ_INT(fsdp_plan_text(b->plan, out->count - 1, FSDP_PLAN_TEXT_OPS, text, NETS_TEXT),
                     length);
}

H_FN void nets_train(fsdp_world *w, nets_job *j, int planned, nets_result *out) {
    nets_bed b;
    memset(out, 0, sizeof *out);
    snprintf(w_case, sizeof w_case, "%s, rank %d of %d, lanes %d, %s", j->net.name, fsdp_rank(w),
             fsdp_world_size(w), j->lanes, planned ? "planned" : "by calls");
    nets_begin(&b, j, w);
    b.by_hand = !planned && j->by_hand;
    if (planned) CALL(w, fsdp_plan_create(b.m, &j->desc, &b.plan));
    if (planned && j->passive) CALL(w, fsdp_plan_pause(b.plan, 1));
    if (j->watched) lab_watch(&b.log, w, b.m);
    for (int it = 0; it < j->iters; it++) (j->step ? j->step : nets_step)(&b, out, it);
    nets_numbers(&b, out, planned && fsdp_rank(w) == 0 ? j->text : NULL);
    nets_end(&b);
}
H_FN void nets_on_rank(lab_rank *r) {
    nets_job *j = (nets_job *)r->arg;
    for (int planned = 0; planned < 2; planned++)
        nets_train(r->w, j, planned, &j->r[planned][r->rank]);
}

/* Checks that two runs have the same bits: losses, parameters, gradients, shards, states of units
   and random numbers. */
H_FN void nets_compare(const nets_result *a, const nets_result *b, int iters) {
    for (int it = 0; it < iters; it++) {
        CHECK_MSG(lab_same(a->loss[it], b->loss[it]),
                  "iteration %d: loss %.17g, by calls %.17g; %s", it, b->loss[it], a->loss[it],
                  b->why);
        CHECK_MSG(a->seen[it] == b->seen[it], "iteration %d: other parameters; %s", it, b->why);
        CHECK_MSG(a->grads[it] == b->grads[it], "iteration %d: other gradients; %s", it, b->why);
        CHECK_MSG(a->shards[it] == b->shards[it], "iteration %d: other shards; %s", it, b->why);
        CHECK_MSG(a->states[it] == b->states[it], "iteration %d: other states; %s", it, b->why);
        CHECK_MSG(a->draws[it] == b->draws[it], "iteration %d: other random numbers", it);
    }
}
/* One warm-up, one recorded step, and all others from the tape. */
H_FN void nets_check_life(const nets_result *b, int iters) {
    CHECK_MSG(b->count == 1, "%d plans: %s", b->count, b->why);
    CHECK_EQ_INT(b->mode[0], FSDP_PLAN_RECORDING);
    CHECK_EQ_INT(b->mode[1], FSDP_PLAN_REPLAYING);
    for (int it = 2; it < iters; it++) {
        CHECK_MSG(b->mode[it] == FSDP_PLAN_REPLAYING, "iteration %d: %s", it, b->why);
        CHECK_EQ_INT(b->allocations[it], 0);
    }
    CHECK_EQ_INT(b->report.recorded, 1);
    CHECK_EQ_INT(b->report.replayed, iters - 2);
    CHECK_EQ_INT(b->report.left, 0);
    CHECK_EQ_INT(b->report.calls, b->hooks + 1); /* finalize */
    CHECK_EQ_INT(b->slots, b->report.bytes[1]);
    CHECK(b->report.bytes[1] >= b->report.bound);
}

H_FN void nets_reset(nets_job *j, nets_net net) {
    memset(j, 0, sizeof *j);
    j->net = net;
    j->iters = 10;
}

/* Trains eagerly and with a plan, and compares. */
H_FN void nets_run(nets_job *j, int size, int lanes) {
    lab_how how = FSDP_ZERO;
    CHECK(size <= NETS_RANKS && j->iters <= NETS_ITERS);
    j->size = size;
    how.lanes = j->lanes = lanes;
    lab_run(size, &how, nets_on_rank, j);
    for (int r = 0; r < size; r++) {
        const nets_result *a = &j->r[0][r], *b = &j->r[1][r];
        snprintf(w_case, sizeof w_case, "%s, rank %d of %d, lanes %d", j->net.name, r, size, lanes);
        CHECK_MSG(!h_non_finite(a->loss[0]) && a->loss[0] != 0, "loss %g", a->loss[0]);
        CHECK(!lab_same(a->loss[j->iters - 1], a->loss[0]));
        CHECK(a->shards[1] != a->shards[0]);
        nets_compare(a, b, j->iters);
        if (!j->passive) nets_check_life(b, j->iters);
        CHECK(r == 0 || j->passive || b->report.hash == j->r[1][0].report.hash);
    }
}

/* ---- texts -------------------------------------------------------------------------------------- */

/* Returns how many lines of calls [from, to) begin with `begin` (after the indent) and contain
   `word` after it. */
H_FN int nets_lines(const char *text, int from, int to, const char *begin, const char *word) {
    int call = -1, count = 0;
    for (const char *line = text; line && *line;) {
        const char *end = strchr(line, '\n');
        char one[4200];
        CHECK(end && end - line < (long)sizeof one);
        memcpy(one, line, (size_t)(end - line));
        one[end - line] = 0;
        line = end + 1;
        if (sscanf(one, "call %d ", &call) == 1 || call < from || call >= to) continue;
        if (!strncmp(one, "  op ", 5)) /* without its number */
            memmove(one + 5, one + 5 + strspn(one + 5, "0123456789 "),
                    strlen(one + 5 + strspn(one + 5, "0123456789 ")) + 1);
        if (strncmp(one, "  ", 2) || strncmp(one + 2, begin, strlen(begin))) continue;
        count += !word || strstr(one + 2 + strlen(begin), word) != NULL;
    }
    return count;
}
/* Returns how many parameters the slots hold that calls [from, to) acquire or release (`what`);
   only gathered slots count. */
H_FN int nets_slots(const nets_job *j, int from, int to, const char *what) {
    int call = -1, count = 0, gathered[256] = {0};
    for (const char *line = j->text; line && *line;
         line = strchr(line, '\n'), line += line != NULL) {
        char word[16], name[64], pool[16];
        int slot;
        if (sscanf(line, "slot %d %15s", &slot, pool) == 2 && slot < 256)
            gathered[slot] = !strcmp(pool, "gather");
        if (sscanf(line, "call %d ", &call) == 1 || call < from || call >= to) continue;
        if (sscanf(line, "  %15s '%63[^']' slot %d", word, name, &slot) != 3) continue;
        if (strcmp(word, what) || !gathered[slot]) continue;
        count += j->net.unit[strcmp(name, "root") ? atoi(name + 2) : 0].num_params;
    }
    return count;
}
#endif
