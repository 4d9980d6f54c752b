/* probe_checkpoint.c - a job that saves a model and its AdamW states, or loads them and checks each
   element; test_safetensors.py compares it with PyTorch. The model is that of golden/checkpoints,
   and so are the values: element i of NAME is value i of the seed FNV-1a(NAME), rounded to its
   dtype.

       probe_checkpoint save RANKS DIR               makes DIR/step-00000017
       probe_checkpoint load RANKS PATH [partial]    prints the number of tensors found by a rank

   SPDX-License-Identifier: MIT */
#include "golden.h"
#include "library.h"

enum { LAYERS = 2, PARAMS = 7, STEP = 17 };

typedef struct job {
    const char *path;
    int load, partial;
} job;

static uint64_t seed_of(const char *name) {
    uint32_t h = 0x811C9DC5u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x01000193u;
    return h;
}

/* Writes a tensor of this rank, or compares it. Returns 1 if it has wrong values that are not all
   0. */
static int visit(const char *name, const fsdp_param_view *v, fsdp_dtype dtype, void *data,
                 int write, int *found) {
    const int64_t size = (int64_t)fsdp_dtype_size(dtype);
    int same = 1, zero = 1;
    for (int64_t k = 0; k < v->numel; k++) {
        float value = (float)golden_value(seed_of(name), (uint64_t)fsdp_view_index(v, k), 1);
        char want[8], none[8] = {0}, *at = (char *)data + k * size;
        if (fsdp_convert(want, dtype, &value, FSDP_F32, 1)) return 1;
        if (write) memcpy(at, want, (size_t)size);
        same = same && !memcmp(at, want, (size_t)size);
        zero = zero && !memcmp(at, none, (size_t)size);
    }
    *found += v->numel > 0 && same;
    if (!same && !zero) fprintf(stderr, "%s has other values\n", name);
    return !same && !zero;
}

static int visit_all(fsdp_model *model, int write, int *found) {
    fsdp_param_view views[LAYERS * PARAMS], v = FSDP_ZERO;
    fsdp_state_item item = FSDP_ZERO;
    char name[200];
    int bad = 0;
    while (fsdp_next_param(model, &v)) {
        views[v.ordinal] = v;
        snprintf(name, sizeof name, "%s.%s", v.unit_name, v.name);
        bad |= visit(name, &v, v.dtype, v.shard, write, found);
    }
    while (!fsdp_next_state(model, &item) && item.name) {
        const fsdp_param_view *p = &views[item.ordinal];
        snprintf(name, sizeof name, "optim.state.%s.%s.%s", p->unit_name, p->name, item.name);
        if (item.sharded) {
            bad |= visit(name, p, item.dtype, item.data, write, found);
            continue;
        }
        int64_t want = STEP + (p->unit_name[7] - '0'), *at = (int64_t *)item.data;
        if (write) *at = want;
        *found += *at == want;
        if (*at != want && *at) fprintf(stderr, "%s is %lld\n", name, (long long)*at);
        bad |= *at != want && *at;
    }
    return bad || (write && (fsdp_state_loaded(model) || fsdp_params_changed(model)));
}

static int run(fsdp_world *w, void *arg) {
    const job *j = (const job *)arg;
    static const int64_t shapes[PARAMS][3] = {{37, 19}, {19}, {5, 37}, {2}, {7}, {3, 4, 5}, {0, 3}};
    static const int dims[PARAMS] = {2, 1, 2, 1, 1, 3, 2};
    static const char *const names[PARAMS] = {"w", "b", "side", "tiny", "frozen", "half", "none"};
    static const char *const units[LAYERS] = {"layers.0", "layers.1"};
    fsdp_checkpoint_load_desc how = FSDP_ZERO;
    fsdp_checkpoint_report report;
    fsdp_checkpoint *ck;
    fsdp_model *model;
    fsdp_adamw *opt;
    int found = 0;
    if (fsdp_model_create(w, NULL, &model)) return 1;
    for (int l = 0; l < LAYERS; l++) {
        fsdp_param_desc p[PARAMS];
        fsdp_unit_desc d = FSDP_ZERO;
        memset(p, 0, sizeof p);
        for (int i = 0; i < PARAMS; i++) {
            p[i].name = names[i], p[i].ndim = dims[i];
            memcpy(p[i].shape, shapes[i], sizeof shapes[i]);
        }
        p[2].shard_dim = 1;
        p[4].dtype = FSDP_BF16, p[4].frozen = 1;
        p[5].dtype = FSDP_F16, p[5].frozen = 1;
        d.name = units[l], d.params = p, d.num_params = PARAMS;
        fsdp_unit *unit;
        if (fsdp_fully_shard(model, &d, &unit)) return 1;
    }
    if (fsdp_adamw_create(model, NULL, &opt) || fsdp_checkpoint_create(model, NULL, &ck)) return 1;
    if (!j->load)
        return fsdp_params_writable(model) || visit_all(model, 1, &found) ||
               fsdp_checkpoint_save(ck, j->path, STEP);
    how.partial = j->partial;
    if (fsdp_checkpoint_load(ck, j->path, &how) || visit_all(model, 0, &found)) return 1;
    if (fsdp_checkpoint_last_report(ck, &report)) return 1;
    printf("rank %d: %d tensors are right, %d missing\n", fsdp_rank(w), found, report.num_missing);
    return fflush(stdout) || (!j->partial && report.num_missing);
}

int main(int argc, char **argv) {
    fsdp_spawn_desc d = FSDP_ZERO;
    job j = {NULL, 0, 0};
    if (argc < 4) return 2;
    j.load = !strcmp(argv[1], "load"), j.partial = argc > 4, j.path = argv[3];
    d.num_ranks = atoi(argv[2]);
    return fsdp_spawn(&d, run, &j) != FSDP_OK;
}
