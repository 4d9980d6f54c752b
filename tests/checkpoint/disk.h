/* disk.h - files for tests of checkpoints: a disk in memory that models a power cut, and file calls
   that fail, come short, wait or kill on demand.

       disk *d = disk_new();
       shake s;
       shake_init(&s, &disk_ops, d, rank);      // desc.files = &shake_ops, desc.files_user = &s
       shake_arm(&s, 3, SHAKE_ERROR, EIO);      // call number 3 from now on

   A disk logs what was done to it. Data is durable once its file has been synced, a name once its
   directory has. A cut after any entry of the log leaves the durable effects and any part of the
   others: for data, each block of 512 bytes separately. Include it after lab.h.

   SPDX-License-Identifier: MIT */
#ifndef DISK_H
#define DISK_H
#include "fsdp_checkpoint.h"

/* ---- a disk in memory ------------------------------------------------------------------------ */

enum { DISK_NAME = 96, DISK_SECTOR = 512 };
enum { DISK_ADD, DISK_WRITE, DISK_SYNC, DISK_RENAME, DISK_REMOVE, DISK_MARK };
enum { /* kinds of syncs, by their purpose */
       DISK_OF_DATA = 1,
       DISK_OF_MANIFEST = 2,
       DISK_OF_TEMPORARY = 4, /* directory of a save */
       DISK_OF_RUN = 8,
       DISK_OF_PARENT = 16
};

typedef struct disk_entry {
    char name[DISK_NAME];
    int node;
} disk_entry;

typedef struct disk_node { /* a file or a directory; node 0 is the root */
    int is_dir, role;      /* role: DISK_OF_* */
    unsigned char *data;
    int64_t size;
    disk_entry *entries;
    int num;
} disk_node;

typedef struct disk_record {
    int kind, node, dir; /* dir: directory of the name; node: for a mark, its number */
    char name[DISK_NAME], to[DISK_NAME];
    int64_t at, nbytes;
    unsigned char *data;
} disk_record;

typedef struct disk {
    pthread_mutex_t lock;
    disk_node *nodes;
    disk_record *log;
    int num_nodes, num_log, quiet; /* quiet: nothing is logged */
} disk;

H_FN void *disk_grow(void *list, int num, size_t size) { /* grows a list by doubling */
    if (num & (num - 1)) return list;
    list = realloc(list, (size_t)(num ? 2 * num : 1) * size);
    CHECK(list != NULL);
    return list;
}

H_FN int disk_add_node(disk *d, int is_dir, int role) {
    d->nodes = (disk_node *)disk_grow(d->nodes, d->num_nodes, sizeof *d->nodes);
    memset(&d->nodes[d->num_nodes], 0, sizeof *d->nodes);
    d->nodes[d->num_nodes].is_dir = is_dir;
    d->nodes[d->num_nodes].role = role;
    return d->num_nodes++;
}
H_FN disk *disk_new(void) {
    disk *d = (disk *)calloc(1, sizeof *d);
    CHECK(d != NULL);
    pthread_mutex_init(&d->lock, NULL);
    disk_add_node(d, 1, DISK_OF_PARENT);
    return d;
}
H_FN void disk_free(disk *d) {
    if (!d) return;
    for (int i = 0; i < d->num_nodes; i++) free(d->nodes[i].data), free(d->nodes[i].entries);
    for (int i = 0; i < d->num_log; i++) free(d->log[i].data);
    free(d->nodes), free(d->log), free(d);
}
/* Copies the files without the log. */
H_FN disk *disk_copy(const disk *from) {
    disk *d = disk_new();
    for (int i = 0; i < from->num_nodes; i++) {
        const disk_node *x = &from->nodes[i];
        if (i) disk_add_node(d, x->is_dir, x->role);
        disk_node *y = &d->nodes[i];
        *y = *x;
        y->data = (unsigned char *)malloc((size_t)x->size + 1);
        y->entries = NULL;
        CHECK(y->data != NULL);
        if (x->size) memcpy(y->data, x->data, (size_t)x->size);
        for (int k = 0; k < x->num; k++) {
            y->entries = (disk_entry *)disk_grow(y->entries, k, sizeof *y->entries);
            y->entries[k] = x->entries[k];
        }
    }
    d->quiet = 1;
    return d;
}

H_FN disk_record *disk_note(disk *d, int kind, int node, int dir, const char *name) {
    static __thread disk_record none;
    if (d->quiet) return &none;
    d->log = (disk_record *)disk_grow(d->log, d->num_log, sizeof *d->log);
    disk_record *r = &d->log[d->num_log++];
    memset(r, 0, sizeof *r);
    r->kind = kind, r->node = node, r->dir = dir;
    snprintf(r->name, sizeof r->name, "%s", name ? name : "");
    return r;
}
/* Adds a numbered mark to the log. */
H_FN void disk_mark(disk *d, int number) {
    pthread_mutex_lock(&d->lock);
    disk_note(d, DISK_MARK, number, 0, NULL);
    pthread_mutex_unlock(&d->lock);
}

/* Returns the index of a name in a directory, or -1. */
H_FN int disk_index(const disk *d, int dir, const char *name) {
    for (int i = 0; i < d->nodes[dir].num; i++)
        if (!strcmp(d->nodes[dir].entries[i].name, name)) return i;
    return -1;
}
H_FN void disk_put_name(disk *d, int dir, const char *name, int node) {
    disk_node *x = &d->nodes[dir];
    int i = disk_index(d, dir, name);
    if (i < 0) {
        x->entries = (disk_entry *)disk_grow(x->entries, x->num, sizeof *x->entries);
        i = x->num++;
        snprintf(x->entries[i].name, DISK_NAME, "%s", name);
    }
    x->entries[i].node = node;
}
H_FN void disk_drop_name(disk *d, int dir, const char *name) {
    disk_node *x = &d->nodes[dir];
    int i = disk_index(d, dir, name);
    if (i < 0) return;
    memmove(&x->entries[i], &x->entries[i + 1], (size_t)(x->num - i - 1) * sizeof *x->entries);
    x->num--;
}
H_FN void disk_put_bytes(disk_node *x, int64_t at, const unsigned char *from, int64_t nbytes) {
    if (at + nbytes > x->size) {
        x->data = (unsigned char *)realloc(x->data, (size_t)(at + nbytes));
        CHECK(x->data != NULL);
        memset(x->data + x->size, 0, (size_t)(at + nbytes - x->size));
        x->size = at + nbytes;
    }
    if (from && nbytes) memcpy(x->data + at, from, (size_t)nbytes);
}

/* Finds the node at a path, and its last directory and name. Returns 0 or an errno value. */
H_FN int disk_walk(const disk *d, const char *path, int *dir, char leaf[DISK_NAME], int *node) {
    *node = 0, *dir = 0, leaf[0] = 0;
    for (const char *c = path; *c;) {
        size_t n = strcspn(c, "/");
        if (n && !(n == 1 && *c == '.')) {
            if (*node < 0) return ENOENT;
            if (!d->nodes[*node].is_dir) return ENOTDIR;
            if (n >= DISK_NAME) return ENAMETOOLONG;
            *dir = *node;
            memcpy(leaf, c, n), leaf[n] = 0;
            int i = disk_index(d, *dir, leaf);
            *node = i < 0 ? -1 : d->nodes[*dir].entries[i].node;
        }
        c += n;
        if (*c) c++;
    }
    return *node < 0 ? ENOENT : 0;
}
H_FN int disk_node_at(const disk *d, const char *path) {
    int dir, node;
    char leaf[DISK_NAME];
    return disk_walk(d, path, &dir, leaf, &node) ? -1 : node;
}

H_FN int disk_make(disk *d, const char *path, int is_dir, int *node) {
    int dir;
    char leaf[DISK_NAME];
    int error = disk_walk(d, path, &dir, leaf, node);
    if (!error) return EEXIST;
    if (error != ENOENT || !leaf[0]) return error;
    const char *last = strrchr(path, '/');
    /* a directory of the path is missing */
    if (strcmp(last ? last + 1 : path, leaf) != 0) return ENOENT;
    *node = disk_add_node(d, is_dir,
                          !is_dir ? strcmp(leaf, "manifest.json") ? DISK_OF_DATA : DISK_OF_MANIFEST
                          : leaf[0] == '.' ? DISK_OF_TEMPORARY
                                           : DISK_OF_RUN);
    disk_put_name(d, dir, leaf, *node);
    disk_note(d, DISK_ADD, *node, dir, leaf);
    return 0;
}

H_FN disk *disk_lock(void *user) {
    pthread_mutex_lock(&((disk *)user)->lock);
    return (disk *)user;
}
H_FN int disk_unlock(disk *d, int error) {
    pthread_mutex_unlock(&d->lock);
    return error;
}

H_FN int disk_open(void *user, const char *path, int create, void **file, int64_t *nbytes) {
    disk *d = disk_lock(user);
    int node = -1, error = create ? disk_make(d, path, 0, &node) : 0;
    if (!create && (node = disk_node_at(d, path)) < 0) error = ENOENT;
    if (!error && d->nodes[node].is_dir) error = EISDIR;
    if (!error) *file = (void *)(intptr_t)(node + 1), *nbytes = d->nodes[node].size;
    return disk_unlock(d, error);
}
H_FN int disk_read(void *user, void *file, void *data, int64_t nbytes, int64_t at, int64_t *done) {
    disk *d = disk_lock(user);
    const disk_node *x = &d->nodes[(intptr_t)file - 1];
    *done = at >= x->size ? 0 : nbytes < x->size - at ? nbytes : x->size - at;
    if (*done) memcpy(data, x->data + at, (size_t)*done);
    return disk_unlock(d, 0);
}
H_FN int disk_write(void *user, void *file, const void *data, int64_t nbytes, int64_t at,
                    int64_t *done) {
    disk *d = disk_lock(user);
    int node = (int)((intptr_t)file - 1);
    disk_put_bytes(&d->nodes[node], at, (const unsigned char *)data, nbytes);
    *done = nbytes;
    if (!d->quiet) {
        disk_record *r = disk_note(d, DISK_WRITE, node, 0, NULL);
        r->at = at, r->nbytes = nbytes;
        r->data = (unsigned char *)malloc((size_t)nbytes);
        CHECK(r->data != NULL);
        memcpy(r->data, data, (size_t)nbytes);
    }
    return disk_unlock(d, 0);
}
H_FN int disk_sync(void *user, void *file) {
    disk *d = disk_lock(user);
    disk_note(d, DISK_SYNC, (int)((intptr_t)file - 1), 0, NULL);
    return disk_unlock(d, 0);
}
H_FN int disk_close(void *user, void *file) {
    (void)user, (void)file;
    return 0;
}
H_FN int disk_make_dir(void *user, const char *path) {
    int node;
    disk *d = disk_lock(user);
    return disk_unlock(d, disk_make(d, path, 1, &node));
}
H_FN int disk_sync_dir(void *user, const char *path) {
    disk *d = disk_lock(user);
    int node = disk_node_at(d, path);
    if (node >= 0) disk_note(d, DISK_SYNC, node, 0, NULL);
    return disk_unlock(d, node < 0 ? ENOENT : 0);
}
H_FN int disk_rename(void *user, const char *from, const char *to) { /* within one directory */
    int dir = 0, node = -1, to_dir = 0, there = -1;
    char leaf[DISK_NAME], to_leaf[DISK_NAME];
    disk *d = disk_lock(user);
    int error = disk_walk(d, from, &dir, leaf, &node);
    if (!error && !disk_walk(d, to, &to_dir, to_leaf, &there)) error = EEXIST;
    if (!error && dir != to_dir) error = EXDEV;
    if (error) return disk_unlock(d, error);
    disk_drop_name(d, dir, leaf);
    disk_put_name(d, dir, to_leaf, node);
    disk_record *r = disk_note(d, DISK_RENAME, node, dir, leaf);
    snprintf(r->to, sizeof r->to, "%s", to_leaf);
    return disk_unlock(d, 0);
}
H_FN int disk_remove(void *user, const char *path, int is_dir) {
    int dir = 0, node = -1;
    char leaf[DISK_NAME];
    disk *d = disk_lock(user);
    int error = disk_walk(d, path, &dir, leaf, &node);
    if (!error && d->nodes[node].is_dir != is_dir) error = is_dir ? ENOTDIR : EISDIR;
    if (!error && d->nodes[node].num) error = ENOTEMPTY;
    if (!error) disk_drop_name(d, dir, leaf), disk_note(d, DISK_REMOVE, node, dir, leaf);
    return disk_unlock(d, error);
}
H_FN int disk_list(void *user, const char *path, int (*each)(void *arg, const char *name),
                   void *arg) {
    disk *d = (disk *)user;
    disk_entry *names = NULL;
    int num = 0, stop = 0, error = 0;
    pthread_mutex_lock(&d->lock);
    int node = disk_node_at(d, path);
    if (node < 0) error = ENOENT;
    else if (!d->nodes[node].is_dir) error = ENOTDIR;
    else num = d->nodes[node].num;
    names = (disk_entry *)malloc(((size_t)num + 1) * sizeof *names);
    CHECK(names != NULL);
    if (num) memcpy(names, d->nodes[node].entries, (size_t)num * sizeof *names);
    pthread_mutex_unlock(&d->lock);
    for (int i = 0; i < num && !stop; i++) stop = each(arg, names[i].name);
    free(names);
    return error;
}
static const fsdp_file_ops disk_ops __attribute__((unused)) = {
    1,          sizeof(fsdp_file_ops), disk_open,     disk_read,   disk_write,  disk_sync,
    disk_close, disk_make_dir,         disk_sync_dir, disk_rename, disk_remove, disk_list};

/* Returns how many names in a directory have this prefix. */
H_FN int disk_count(const disk *d, const char *path, const char *prefix) {
    int node = disk_node_at(d, path), count = 0;
    for (int i = 0; node >= 0 && i < d->nodes[node].num; i++)
        count += !strncmp(d->nodes[node].entries[i].name, prefix, strlen(prefix));
    return count;
}
/* Returns a hash of everything that a reader sees: names that begin with a dot are skipped. */
H_FN uint64_t disk_hash(const disk *d, int node) {
    const disk_node *x = &d->nodes[node];
    uint64_t hash = (uint64_t)x->is_dir + 1, sum = 0;
    if (!x->is_dir) {
        lab_fold(&hash, x->data, (size_t)x->size);
        return hash ^ (uint64_t)x->size;
    }
    for (int i = 0; i < x->num; i++) {
        uint64_t one = disk_hash(d, x->entries[i].node);
        if (x->entries[i].name[0] == '.') continue;
        lab_fold(&one, x->entries[i].name, strlen(x->entries[i].name));
        sum += one; /* independent of the order */
    }
    return hash * 31 + sum;
}

/* ---- a power cut ----------------------------------------------------------------------------- */

/* Returns 1 if entry i of the log is durable when the power is cut after the first `upto` entries.
   lost: syncs that have no effect. */
H_FN int disk_is_durable(const disk *d, int i, int upto, int lost) {
    const disk_record *r = &d->log[i];
    int node = r->kind == DISK_WRITE ? r->node : r->dir;
    if (d->nodes[node].role & lost) return 0;
    for (int k = i + 1; k < upto; k++)
        if (d->log[k].kind == DISK_SYNC && d->log[k].node == node) return 1;
    return 0;
}
H_FN int disk_is_effect(const disk_record *r) {
    return r->kind != DISK_SYNC && r->kind != DISK_MARK;
}
/* Returns the number of parts of an entry that a cut may leave: a write has its sectors, and the
   size. */
H_FN int disk_parts(const disk_record *r) {
    if (r->kind != DISK_WRITE) return 1;
    return (int)((r->at + r->nbytes - 1) / DISK_SECTOR - r->at / DISK_SECTOR) + 2;
}
H_FN int disk_num_effects(const disk *d, int upto, int lost) {
    int count = 0;
    for (int i = 0; i < upto; i++)
        if (disk_is_effect(&d->log[i]) && !disk_is_durable(d, i, upto, lost))
            count += disk_parts(&d->log[i]);
    return count;
}

H_FN void disk_apply_part(disk *d, const disk_record *r, int part) {
    if (r->kind == DISK_ADD) disk_put_name(d, r->dir, r->name, r->node);
    if (r->kind == DISK_REMOVE) disk_drop_name(d, r->dir, r->name);
    if (r->kind == DISK_RENAME) {
        disk_drop_name(d, r->dir, r->name);
        disk_put_name(d, r->dir, r->to, r->node);
    }
    if (r->kind != DISK_WRITE) return;
    int64_t begin = (r->at / DISK_SECTOR + part) * DISK_SECTOR, end = begin + DISK_SECTOR;
    if (part == disk_parts(r) - 1) { /* the size is new, the data is missing */
        disk_put_bytes(&d->nodes[r->node], r->at + r->nbytes, NULL, 0);
        return;
    }
    if (begin < r->at) begin = r->at;
    if (end > r->at + r->nbytes) end = r->at + r->nbytes;
    disk_put_bytes(&d->nodes[r->node], begin, r->data + (begin - r->at), end - begin);
}

/* Returns the disk after a cut: the durable effects, and those that are chosen among the others. */
H_FN disk *disk_cut(const disk *from, int upto, int lost, const unsigned char *chosen) {
    disk *d = disk_new();
    int effect = 0;
    d->quiet = 1;
    for (int i = 1; i < from->num_nodes; i++)
        disk_add_node(d, from->nodes[i].is_dir, from->nodes[i].role);
    for (int i = 0; i < upto; i++) {
        const disk_record *r = &from->log[i];
        if (!disk_is_effect(r)) continue;
        int durable = disk_is_durable(from, i, upto, lost);
        for (int part = 0; part < disk_parts(r); part++)
            if (durable || chosen[effect++]) disk_apply_part(d, r, part);
    }
    return d;
}

/* ---- file calls that fail -------------------------------------------------------------------- */

enum {
    SHAKE_NONE,
    SHAKE_ERROR, /* this call fails */
    SHAKE_DEAD,  /* this call and all later ones fail */
    SHAKE_SHORT_1,
    SHAKE_SHORT_HALF,
    SHAKE_SHORT_ALL_BUT_1,
    SHAKE_ZERO, /* nothing is read or written */
    SHAKE_WAIT, /* event(), then the call */
    SHAKE_HANG, /* event() and an error, without the call */
    SHAKE_AFTER /* the call, then event() */
};

typedef struct shake shake;
struct shake {
    const fsdp_file_ops *real;
    void *user;
    int rank, calls, at, kind, error;
    int fired;     /* 1: the fault has happened; 2: this call cannot have such a fault */
    int committed; /* a checkpoint had been renamed before */
    int files;     /* open files */
    char call[40], path[FSDP_CHECKPOINT_PATH];
    void (*event)(shake *s);
    void *arg;
    struct shake_file *open; /* a list, so that leak checkers find files that a hang leaves open */
};
typedef struct shake_file {
    struct shake_file *next;
    void *real;
    char path[FSDP_CHECKPOINT_PATH];
} shake_file;

H_FN void shake_init(shake *s, const fsdp_file_ops *real, void *user, int rank) {
    memset(s, 0, sizeof *s);
    s->real = real, s->user = user, s->rank = rank, s->at = -1;
}
/* Sets a fault for call number `at` from now on. */
H_FN void shake_arm(shake *s, int at, int kind, int error) {
    s->calls = 0, s->kind = kind, s->error = error;
    s->fired = s->committed = 0;
    s->call[0] = s->path[0] = 0;
    s->at = at;
}
H_FN void shake_off(shake *s) { s->at = -1; }

/* Returns the fault of this call: SHAKE_NONE or a kind. */
H_FN int shake_now(shake *s, const char *call, const char *path, int may_be_short) {
    int number = s->calls++;
    if (s->at < 0 || number < s->at || (number > s->at && s->kind != SHAKE_DEAD)) return 0;
    if (number == s->at) {
        snprintf(s->call, sizeof s->call, "%s", call);
        snprintf(s->path, sizeof s->path, "%s", path);
        s->fired = 1;
    }
    if (s->kind >= SHAKE_SHORT_1 && s->kind <= SHAKE_ZERO && !may_be_short) s->fired = 2;
    if (s->fired == 2) return 0;
    if (s->kind == SHAKE_WAIT || s->kind == SHAKE_HANG) s->event(s);
    return s->kind;
}
/* Returns 1 if the fault itself makes the call fail. */
H_FN int shake_fails(int kind) {
    return kind == SHAKE_ERROR || kind == SHAKE_DEAD || kind == SHAKE_HANG;
}
H_FN int shake_end(shake *s, int kind, int result) {
    if (kind == SHAKE_AFTER) s->event(s);
    return result;
}
H_FN int64_t shake_part(int kind, int64_t nbytes) {
    int64_t part = kind == SHAKE_SHORT_1           ? 1
                   : kind == SHAKE_SHORT_HALF      ? nbytes / 2
                   : kind == SHAKE_SHORT_ALL_BUT_1 ? nbytes - 1
                                                   : nbytes;
    return part < 1 ? 1 : part > nbytes ? nbytes : part;
}

H_FN int shake_open(void *user, const char *path, int create, void **file, int64_t *nbytes) {
    shake *s = (shake *)user;
    int kind = shake_now(s, create ? "create" : "open", path, 0);
    if (shake_fails(kind)) return s->error;
    shake_file *f = (shake_file *)calloc(1, sizeof *f);
    CHECK(f != NULL);
    snprintf(f->path, sizeof f->path, "%s", path);
    int error = s->real->open(s->user, path, create, &f->real, nbytes);
    if (error) free(f);
    else *file = f, s->files++, f->next = s->open, s->open = f;
    return shake_end(s, kind, error);
}
H_FN int shake_read(void *user, void *file, void *data, int64_t nbytes, int64_t at, int64_t *done) {
    shake *s = (shake *)user;
    shake_file *f = (shake_file *)file;
    int kind = shake_now(s, "read", f->path, 1);
    *done = 0;
    if (kind == SHAKE_ZERO) return 0;
    if (shake_fails(kind)) return s->error;
    return shake_end(s, kind,
                     s->real->read(s->user, f->real, data, shake_part(kind, nbytes), at, done));
}
H_FN int shake_write(void *user, void *file, const void *data, int64_t nbytes, int64_t at,
                     int64_t *done) {
    shake *s = (shake *)user;
    shake_file *f = (shake_file *)file;
    int kind = shake_now(s, "write", f->path, 1);
    *done = 0;
    if (kind == SHAKE_ZERO) return 0;
    if (shake_fails(kind)) return s->error;
    return shake_end(s, kind,
                     s->real->write(s->user, f->real, data, shake_part(kind, nbytes), at, done));
}
H_FN int shake_sync(void *user, void *file) {
    shake *s = (shake *)user;
    shake_file *f = (shake_file *)file;
    int kind = shake_now(s, "fsync", f->path, 0);
    if (shake_fails(kind)) return s->error;
    return shake_end(s, kind, s->real->sync(s->user, f->real));
}
H_FN int shake_close(void *user, void *file) { /* the file is closed even if the call fails */
    shake *s = (shake *)user;
    shake_file *f = (shake_file *)file;
    int kind = shake_now(s, "close", f->path, 0);
    int error = s->real->close(s->user, f->real);
    shake_file **at = &s->open;
    while (*at != f) at = &(*at)->next;
    *at = f->next;
    free(f);
    s->files--;
    return shake_fails(kind) ? s->error : shake_end(s, kind, error);
}
H_FN int shake_make_dir(void *user, const char *path) {
    shake *s = (shake *)user;
    int kind = shake_now(s, "mkdir", path, 0);
    if (shake_fails(kind)) return s->error;
    return shake_end(s, kind, s->real->make_dir(s->user, path));
}
H_FN int shake_sync_dir(void *user, const char *path) {
    shake *s = (shake *)user;
    int kind = shake_now(s, "fsync of the directory", path, 0);
    if (shake_fails(kind)) return s->error;
    return shake_end(s, kind, s->real->sync_dir(s->user, path));
}
H_FN int shake_rename(void *user, const char *from, const char *to) {
    shake *s = (shake *)user;
    int kind = shake_now(s, "rename", to, 0);
    if (shake_fails(kind)) return s->error;
    int error = s->real->rename(s->user, from, to);
    if (!error && !s->fired && strstr(to, "/step-")) s->committed = 1;
    return shake_end(s, kind, error);
}
H_FN int shake_remove(void *user, const char *path, int is_dir) {
    shake *s = (shake *)user;
    int kind = shake_now(s, "removal", path, 0);
    if (shake_fails(kind)) return s->error;
    return shake_end(s, kind, s->real->remove(s->user, path, is_dir));
}
H_FN int shake_list(void *user, const char *path, int (*each)(void *arg, const char *name),
                    void *arg) {
    shake *s = (shake *)user;
    int kind = shake_now(s, "list", path, 0);
    if (shake_fails(kind)) return s->error;
    return shake_end(s, kind, s->real->list(s->user, path, each, arg));
}
static const fsdp_file_ops shake_ops __attribute__((unused)) = {
    1,           sizeof(fsdp_file_ops), shake_open,     shake_read,   shake_write,  shake_sync,
    shake_close, shake_make_dir,        shake_sync_dir, shake_rename, shake_remove, shake_list};

/* ---- files of the system --------------------------------------------------------------------- */

H_FN int system_open(void *user, const char *path, int create, void **file, int64_t *nbytes) {
    struct stat st;
    (void)user;
    int fd = open(path, create ? O_WRONLY | O_CREAT | O_EXCL : O_RDONLY, 0600);
    if (fd < 0) return errno;
    int error = fstat(fd, &st) ? errno : S_ISREG(st.st_mode) ? 0 : EISDIR;
    *nbytes = (int64_t)st.st_size;
    *file = (void *)(intptr_t)(fd + 1);
    if (error) close(fd);
    return error;
}
H_FN int system_read(void *user, void *file, void *data, int64_t nbytes, int64_t at,
                     int64_t *done) {
    (void)user;
    *done = pread((int)(intptr_t)file - 1, data, (size_t)nbytes, (off_t)at);
    return *done < 0 ? errno : 0;
}
H_FN int system_write(void *user, void *file, const void *data, int64_t nbytes, int64_t at,
                      int64_t *done) {
    (void)user;
    *done = pwrite((int)(intptr_t)file - 1, data, (size_t)nbytes, (off_t)at);
    return *done < 0 ? errno : 0;
}
H_FN int system_sync(void *user, void *file) {
    (void)user;
    return fsync((int)(intptr_t)file - 1) ? errno : 0;
}
H_FN int system_close(void *user, void *file) {
    (void)user;
    return close((int)(intptr_t)file - 1) ? errno : 0;
}
H_FN int system_make_dir(void *user, const char *path) {
    (void)user;
    return mkdir(path, 0700) ? errno : 0;
}
H_FN int system_sync_dir(void *user, const char *path) {
    (void)user, (void)path;
    return 0;
}
H_FN int system_rename(void *user, const char *from, const char *to) {
    struct stat st;
    (void)user;
    if (!stat(to, &st)) return EEXIST;
    return rename(from, to) ? errno : 0;
}
H_FN int system_remove(void *user, const char *path, int is_dir) {
    (void)user;
    return (is_dir ? rmdir(path) : unlink(path)) ? errno : 0;
}
H_FN int system_list(void *user, const char *path, int (*each)(void *arg, const char *name),
                     void *arg) {
    const struct dirent *entry;
    int stop = 0;
    (void)user;
    DIR *dir = opendir(path);
    if (!dir) return errno;
    while (!stop && (entry = readdir(dir)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            stop = each(arg, entry->d_name);
    closedir(dir);
    return 0;
}
static const fsdp_file_ops system_ops __attribute__((unused)) = {1,
                                                                 sizeof(fsdp_file_ops),
                                                                 system_open,
                                                                 system_read,
                                                                 system_write,
                                                                 system_sync,
                                                                 system_close,
                                                                 system_make_dir,
                                                                 system_sync_dir,
                                                                 system_rename,
                                                                 system_remove,
                                                                 system_list};
#endif
