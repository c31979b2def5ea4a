// Has tritonserver wait where a busy machine is slower than it expects, and not for the dead.
//
// Loaded with guard.c, these functions are found before those of the same names in the C library.
// What they do in tritonserver, for two callers:
//
// - The Python backend waits a second for a message of a model's process, or for room for one, and
//   then gives up a process that showed no sign of life in that second; it shows three. A machine
//   with twenty threads to run on each core may let it show none: 11 of some 60 starts failed by
//   that. What was sent is freed, and a process that reads it only now crashes, and the server with
//   it. One that has read it serves on; but the server waits for its end, and never gets ready. So
//   the wait goes on for `PATIENCE_S`, as long as the process is there.
// - The Python backend shares robust mutexes with a model's process. When that one is killed while it
//   holds one, boost throws, nobody catches it, and the server ends by `lock_exception`. What such a
//   mutex guards belongs to that one process and goes with it; so the server gets the mutex as if it
//   had been given back, and then finds out, as it does otherwise, that the process is not there.
// - libevhtp tells an HTTP thread of each response on its connections' streams through a socket that
//   holds 278 messages (of 212,992 bytes). What the socket does not take, `evthr_defer` drops, and
//   nobody asks. So streams whose thread was late lost their last responses, or the first line of
//   the first, which no HTTP client reads, and without which it goes unnoticed when that client
//   leaves. So there is a wait for room: of `PATIENCE_S`, but no second one in vain, as it keeps
//   others waiting, too.

#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

int lock_in_turn(pthread_mutex_t* mutex, int (*lock)(pthread_mutex_t*));  // locks.c

#define EXPORTED __attribute__((visibility("default")))

// An address in whoever called the exported function in which this stands.
#define CALLER __builtin_return_address(0)

enum { PATIENCE_S = 20 };
enum { MESSAGE_BYTES = 17 };  // sizeof(evthr_cmd_t), which is packed
enum { MAX_SOCKETS = 1024 };  // those of the HTTP threads are among the first

typedef int (*TimedWait)(sem_t*, const struct timespec*);
typedef int (*Lock)(pthread_mutex_t*);
typedef int (*TimedLock)(pthread_mutex_t*, const struct timespec*);
typedef int (*WaitCondition)(pthread_cond_t*, pthread_mutex_t*);
typedef ssize_t (*Send)(int, const void*, size_t, int);

static _Atomic(TimedWait) timed_wait;
static _Atomic(Lock) lock_mutex;
static _Atomic(TimedLock) timed_lock;
static _Atomic(WaitCondition) wait_condition;
static _Atomic(Send) send_now;

// By socket, whether a whole wait for room was in vain, and there has been none since.
static atomic_bool is_given_up[MAX_SOCKETS];

// Whether tritonserver runs this, and the address lies in the program or library of such a name.
static int is_in(const void* address, const char* name)
{
    Dl_info info;
    if (strcmp(program_invocation_short_name, "tritonserver") != 0 || !dladdr(address, &info)) {
        return 0;
    }
    const char* slash = strrchr(info.dli_fname, '/');
    return strcmp(slash ? slash + 1 : info.dli_fname, name) == 0;
}

// The file of the shared memory in which the address lies; 0 where there is none.
static int find_region(const void* address, char* name, size_t size)
{
    FILE* maps = fopen("/proc/self/maps", "re");
    char line[1024];
    int is_found = 0;
    while (maps && !is_found && fgets(line, sizeof(line), maps)) {
        uintptr_t from, to;
        const char* file = strstr(line, "/dev/shm/");
        if (file && sscanf(line, "%" SCNxPTR "-%" SCNxPTR, &from, &to) == 2 &&
            from <= (uintptr_t)address && (uintptr_t)address < to) {
            file += strlen("/dev/shm/");
            snprintf(name, size, "%.*s", (int)strcspn(file, " \n"), file);
            is_found = 1;
        }
    }
    if (maps) {
        fclose(maps);
    }
    return is_found;
}

// Whether a process that has not ended got this argument.
static int is_argument(const char* value)
{
    DIR* processes = opendir("/proc");
    int is_found = 0;
    for (struct dirent* entry; processes && !is_found && (entry = readdir(processes));) {
        char path[300], arguments[4096];
        if (!isdigit((unsigned char)entry->d_name[0])) {
            continue;
        }
        snprintf(path, sizeof(path), "/proc/%s/cmdline", entry->d_name);
        FILE* file = fopen(path, "re");
        const size_t size = file ? fread(arguments, 1, sizeof(arguments) - 1, file) : 0;
        if (file) {
            fclose(file);
        }
        arguments[size] = 0;
        for (size_t i = 0; i < size && !is_found; i += strlen(arguments + i) + 1) {
            is_found = strcmp(arguments + i, value) == 0;
        }
    }
    if (processes) {
        closedir(processes);
    }
    return is_found;
}

// Whether the process is there with which the semaphore is shared: it is named its memory's file.
static int has_process(const sem_t* semaphore)
{
    char region[256];
    return find_region(semaphore, region, sizeof(region)) && is_argument(region);
}

EXPORTED int sem_timedwait(sem_t* semaphore, const struct timespec* deadline)
{
    if (!timed_wait) {
        timed_wait = (TimedWait)dlsym(RTLD_NEXT, "sem_timedwait");
    }
    int result = timed_wait(semaphore, deadline);
    if (result == 0 || errno != ETIMEDOUT || !is_in(CALLER, "libtriton_python.so")) {
        return result;
    }
    for (int i = 1; i < PATIENCE_S && has_process(semaphore); ++i) {
        struct timespec later;
        clock_gettime(CLOCK_REALTIME, &later);
        later.tv_sec += 1;
        result = timed_wait(semaphore, &later);
        if (result == 0 || errno != ETIMEDOUT) {
            return result;
        }
    }
    errno = ETIMEDOUT;
    return -1;
}

// What locking a mutex has come to, which for that of a process that died is a success.
static int inherited(pthread_mutex_t* mutex, int result, const void* caller)
{
    if (result == EOWNERDEAD && is_in(caller, "libtriton_python.so")) {
        return pthread_mutex_consistent(mutex);
    }
    return result;
}

EXPORTED int pthread_mutex_lock(pthread_mutex_t* mutex)
{
    if (!lock_mutex) {
        lock_mutex = (Lock)dlsym(RTLD_NEXT, "pthread_mutex_lock");
    }
    if (mutex->__data.__kind == PTHREAD_MUTEX_RECURSIVE) {  // as those of locks.c are
        const int result = pthread_mutex_trylock(mutex);
        if (result != EBUSY || is_in(CALLER, "tritonserver")) {
            return result == EBUSY ? lock_in_turn(mutex, lock_mutex) : result;
        }
    }
    return inherited(mutex, lock_mutex(mutex), CALLER);
}

EXPORTED int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex)
{
    if (!wait_condition) {
        wait_condition = (WaitCondition)dlsym(RTLD_NEXT, "pthread_cond_wait");
    }
    return inherited(mutex, wait_condition(condition, mutex), CALLER);
}

EXPORTED int pthread_mutex_timedlock(pthread_mutex_t* mutex, const struct timespec* deadline)
{
    if (!timed_lock) {
        timed_lock = (TimedLock)dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    }
    return inherited(mutex, timed_lock(mutex, deadline), CALLER);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

EXPORTED ssize_t send(int socket, const void* message, size_t size, int flags)
{
    if (!send_now) {
        send_now = (Send)dlsym(RTLD_NEXT, "send");
    }
    ssize_t result = send_now(socket, message, size, flags);
    const int is_message = size == MESSAGE_BYTES && flags == 0 && socket < MAX_SOCKETS;
    if (!is_message || (result < 0 && errno != EAGAIN)) {
        return result;
    }
    if (result < 0 && !is_given_up[socket] && is_in(CALLER, "tritonserver")) {
        struct pollfd room = {.fd = socket, .events = POLLOUT};
        const double until_s = now_s() + PATIENCE_S;
        do {
            poll(&room, 1, 1000);
            result = send_now(socket, message, size, flags);
        } while (result < 0 && errno == EAGAIN && now_s() < until_s);
    }
    is_given_up[socket] = result < 0;
    return result;
}
