/* Preloaded: refuses system calls on the files of the catalog, whoever makes them in C (SQLite).
   The file TXMQ_REFUSED says which: struct control, shared with tests/native_calls.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { OPEN, READ, WRITE, SYNC, TRUNCATE, MAP, KINDS };
enum { DATABASE = 1, LOG = 2 };
#define FILES 65536

struct control {
    int32_t number;         /* of the error */
    int32_t kinds, files;   /* bits */
    int32_t left;           /* refuse so many; negative: all */
    int32_t refused[KINDS]; /* how many were */
};
static struct control *control;
static unsigned char known[FILES];

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TXMQ_REFUSED");
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR, 0) : -1;
    if (file < 0) return;
    void *found = (void *)syscall(SYS_mmap, 0, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    control = found == MAP_FAILED ? 0 : found;
    syscall(SYS_close, file);
}

static int file_of(const char *path) {
    const char *found = path ? strstr(path, "catalog.db") : 0;
    return !found ? 0 : strcmp(found, "catalog.db") ? LOG : DATABASE;
}

static int is_refused(int kind, int file) {
    if (!control || !file || !(control->kinds & 1 << kind) || !(control->files & file) || !control->left) return 0;
    if (control->left > 0) control->left--;
    control->refused[kind]++;
    errno = control->number;
    return 1;
}

static int file_at(int descriptor) { return descriptor >= 0 && descriptor < FILES ? known[descriptor] : 0; }

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define OPENS(name)                                             \
    int name(const char *path, int flags, ...) {                \
        REAL(name);                                             \
        va_list more; va_start(more, flags);                    \
        mode_t mode = va_arg(more, mode_t); va_end(more);       \
        if (is_refused(OPEN, file_of(path))) return -1;         \
        int found = real(path, flags, mode);                    \
        if (found >= 0 && found < FILES) known[found] = (unsigned char)file_of(path); \
        return found;                                           \
    }
OPENS(open)
OPENS(open64)

#define MOVES(name, kind, buffer, offset)                        \
    ssize_t name(int file, buffer data, size_t size, offset at) { \
        REAL(name);                                              \
        return is_refused(kind, file_at(file)) ? -1 : real(file, data, size, at); \
    }
MOVES(pread, READ, void *, off_t)
MOVES(pread64, READ, void *, off64_t)
MOVES(pwrite, WRITE, const void *, off_t)
MOVES(pwrite64, WRITE, const void *, off64_t)

ssize_t read(int file, void *data, size_t size) { REAL(read); return is_refused(READ, file_at(file)) ? -1 : real(file, data, size); }
ssize_t write(int file, const void *data, size_t size) { REAL(write); return is_refused(WRITE, file_at(file)) ? -1 : real(file, data, size); }
int fsync(int file) { REAL(fsync); return is_refused(SYNC, file_at(file)) ? -1 : real(file); }
int fdatasync(int file) { REAL(fdatasync); return is_refused(SYNC, file_at(file)) ? -1 : real(file); }
int ftruncate(int file, off_t size) { REAL(ftruncate); return is_refused(TRUNCATE, file_at(file)) ? -1 : real(file, size); }
int ftruncate64(int file, off64_t size) { REAL(ftruncate64); return is_refused(TRUNCATE, file_at(file)) ? -1 : real(file, size); }

int close(int file) {
    REAL(close);
    if (file >= 0 && file < FILES) known[file] = 0;
    return real(file);
}

void *mmap(void *place, size_t size, int access, int flags, int file, off_t at) {
    if (is_refused(MAP, file_at(file))) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, place, size, access, flags, file, at);
}
void *mmap64(void *place, size_t size, int access, int flags, int file, off64_t at) { return mmap(place, size, access, flags, file, at); }
