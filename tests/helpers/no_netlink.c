// Preloaded into a browser: it does not hear that interfaces of this machine come and go, at which it
// would break off all that it is loading (ERR_NETWORK_CHANGED). Tests beside it make and remove some.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>

int socket(int domain, int type, int protocol) {
  if (domain == AF_NETLINK) {
    errno = EAFNOSUPPORT;
    return -1;
  }
  int (*original)(int, int, int) = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
  return original(domain, type, protocol);
}
