/* Preloaded into a process: what the disk would have if the power went now, and a disk that is slow.
 *
 * POWER_FROM, POWER_TO: each file below the first, as it was when it was last synced, is copied into the second.
 * POWER_SLOW: while there is such a file, a sync takes two seconds.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Names that are gone are gone once the folder is synced; a draft is what it was renamed to. */
static void forget_names(const char *from, const char *to) {
    char path[PATH_MAX], target[PATH_MAX];
    DIR *folder = opendir(to);
    for (struct dirent *each; (each = readdir(folder));) {
        char *draft = strstr(each->d_name, ".new");
        snprintf(path, sizeof path, "%s/%s", from, each->d_name);
        if (each->d_name[0] == '.' || !access(path, F_OK)) continue;
        snprintf(path, sizeof path, "%s/%s", to, each->d_name);
        snprintf(target, sizeof target, "%s/%.*s", to, draft ? (int)(draft - each->d_name) : 0, each->d_name);
        if (draft ? rename(path, target) : unlink(path)) abort();
    }
    closedir(folder);
}

static void copy_synced(int fd) {
    const char *from = getenv("POWER_FROM"), *to = getenv("POWER_TO");
    char link[64], path[PATH_MAX], draft[PATH_MAX], target[PATH_MAX], block[65536];
    struct stat about;
    if (!from || !to || fstat(fd, &about)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    if (strncmp(path, from, strlen(from))) return;
    if (S_ISDIR(about.st_mode)) {
        forget_names(from, to);
        return;
    }
    snprintf(draft, sizeof draft, "%s/draft", to);
    snprintf(target, sizeof target, "%s/%s", to, strrchr(path, '/') + 1);
    int source = open(link, O_RDONLY), copy = open(draft, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    while ((length = read(source, block, sizeof block)) > 0)
        if (write(copy, block, length) != length) abort();
    close(source);
    close(copy);
    if (rename(draft, target)) abort();
}

static int synced(const char *name, int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    const char *slow = getenv("POWER_SLOW");
    if (slow && !access(slow, F_OK)) sleep(2);
    int result = real(fd);
    if (!result) copy_synced(fd);
    return result;
}

int fsync(int fd) { return synced("fsync", fd); }
int fdatasync(int fd) { return synced("fdatasync", fd); }
