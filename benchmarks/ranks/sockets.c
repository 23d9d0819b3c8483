/*
 * The time that plain sockets take between hosts: sockets FOLDER RANK WORLD HOST_OF ADDRESS...
 *
 * HOST_OF is the number of the host of each rank, as 0,0,1,1; ADDRESS is that of each host. A
 * process has one connection to its counterpart on the next host, and one from that on the host
 * before; of two hosts both are the same. For an all_reduce of BYTES among h hosts:
 *
 * exchange: each process sends its share of what its host cannot avoid, 2 (h - 1) / h of BYTES
 * divided by the processes of the host, and receives as much at the same time. Nothing is added up.
 *
 * round_trip: the processes of host 0 send their part of BYTES to the next host and receive it
 * back.
 *
 * A process that can neither send nor receive sleeps in poll(). The commands are those of
 * channel.h, without `check` and `idle`.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "channel.h"

enum { MOST_RANKS = 64 };

static int rank, world, hosts, peers_here;
static int host_of[MOST_RANKS];
static int to_next, from_previous; /* sockets */
static char *outgoing, *incoming;
static size_t room;

/* In a file that all processes map: how many have come to a meeting, and how many meetings there
 * were. */
static struct {
  int arrived;
  int turn;
}* meeting;

static void must(int holds, const char* what) {
  if (!holds) {
    perror(what);
    exit(1);
  }
}

/* Returns when all processes have come. */
static void meet(void) {
  const int turn = __atomic_load_n(&meeting->turn, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&meeting->arrived, 1, __ATOMIC_ACQ_REL) == world) {
    meeting->arrived = 0;
    __atomic_store_n(&meeting->turn, turn + 1, __ATOMIC_RELEASE);
  }
  while (__atomic_load_n(&meeting->turn, __ATOMIC_ACQUIRE) == turn) {
    usleep(0);
  }
}

static void map_meeting(const char* folder) {
  char path[4096];
  snprintf(path, sizeof path, "%s/meeting", folder);
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  must(file >= 0 && ftruncate(file, sizeof *meeting) == 0, path);
  meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  must(meeting != MAP_FAILED, path);
  close(file);
}

/* The rank with the same place on another host. */
static int counterpart(int host) {
  int place = 0;
  for (int before = 0; before < rank; before++) {
    place += host_of[before] == host_of[rank];
  }
  for (int other = 0; other < world; other++) {
    if (host_of[other] == host && place-- == 0) {
      return other;
    }
  }
  fprintf(stderr, "the hosts have different numbers of ranks\n");
  exit(1);
}

/* Every process listens, and leaves its port in a file that appears at once with its content. */
static int listen_at(const char* folder, const char* address) {
  struct sockaddr_in own = {.sin_family = AF_INET};
  must(inet_pton(AF_INET, address, &own.sin_addr) == 1, address);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  socklen_t length = sizeof own;
  must(listener >= 0, "socket");
  must(bind(listener, (struct sockaddr*)&own, sizeof own) == 0 && listen(listener, 1) == 0,
       address);
  getsockname(listener, (struct sockaddr*)&own, &length);
  char path[4096], fresh[4200];
  snprintf(path, sizeof path, "%s/port-%d", folder, rank);
  snprintf(fresh, sizeof fresh, "%s.fresh", path);
  FILE* file = fopen(fresh, "w");
  must(file != NULL, fresh);
  fprintf(file, "%d\n", ntohs(own.sin_port));
  fclose(file);
  must(rename(fresh, path) == 0, path);
  return listener;
}

static int connect_to(const char* folder, int peer, const char* address) {
  char path[4096];
  snprintf(path, sizeof path, "%s/port-%d", folder, peer);
  FILE* file;
  while (!(file = fopen(path, "r"))) {
    usleep(10000);
  }
  int port = 0;
  must(fscanf(file, "%d", &port) == 1, path);
  fclose(file);
  struct sockaddr_in other = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  must(inet_pton(AF_INET, address, &other.sin_addr) == 1, address);
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  must(connection >= 0, "socket");
  must(connect(connection, (struct sockaddr*)&other, sizeof other) == 0, address);
  return connection;
}

static void connect_all(const char* folder, char** addresses) {
  const int own = host_of[rank], next = (own + 1) % hosts;
  const int listener = listen_at(folder, addresses[own]);
  if (hosts > 2 || own == 0) {
    to_next = connect_to(folder, counterpart(next), addresses[next]);
  }
  if (hosts > 2 || own == 1) {
    from_previous = accept(listener, NULL, NULL);
    must(from_previous >= 0, "accept");
  }
  if (hosts == 2) {
    to_next = from_previous = own == 0 ? to_next : from_previous;
  }
  close(listener);
  const int yes = 1, both[2] = {to_next, from_previous};
  for (int index = 0; index < 2; index++) {
    setsockopt(both[index], IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    must(fcntl(both[index], F_SETFL, O_NONBLOCK) == 0, "fcntl");
  }
}

static size_t progress(ssize_t moved, const char* what) {
  must(moved >= 0 || errno == EAGAIN, what);
  return moved > 0 ? (size_t)moved : 0;
}

/* Sends and receives so much, at the same time. */
static void move(size_t sends, size_t receives) {
  size_t sent = 0, received = 0;
  while (sent < sends || received < receives) {
    size_t moved = 0;
    if (sent < sends) {
      moved += progress(send(to_next, outgoing + sent, sends - sent, MSG_NOSIGNAL), "send");
      sent += moved;
    }
    if (received < receives) {
      const ssize_t got = recv(from_previous, incoming + received, receives - received, 0);
      must(got != 0, "the peer has left");
      const size_t bytes = progress(got, "recv");
      received += bytes, moved += bytes;
    }
    if (moved == 0) {
      struct pollfd both[2] = {{.fd = sent < sends ? to_next : -1, .events = POLLOUT},
                               {.fd = received < receives ? from_previous : -1, .events = POLLIN}};
      poll(both, 2, -1);
    }
  }
}

static void round_trip(size_t bytes) {
  if (host_of[rank] == 0) {
    move(bytes, 0);
    move(0, bytes);
  } else {
    move(0, bytes);
    move(bytes, 0);
  }
}

static void make_room(size_t bytes) {
  if (bytes <= room) {
    return;
  }
  free(outgoing);
  free(incoming);
  outgoing = malloc(bytes);
  incoming = malloc(bytes);
  must(outgoing && incoming, "malloc");
  memset(outgoing, 1, bytes);
  memset(incoming, 0, bytes);
  room = bytes;
}

int main(int count, char** arguments) {
  if (count < 6) {
    fprintf(stderr, "sockets FOLDER RANK WORLD HOST_OF ADDRESS...\n");
    return 1;
  }
  const char* folder = arguments[1];
  rank = atoi(arguments[2]);
  world = atoi(arguments[3]);
  must(world <= MOST_RANKS, "so many ranks");
  char* next = arguments[4];
  for (int each = 0; each < world; each++, next += *next == ',') {
    host_of[each] = (int)strtol(next, &next, 10);
    hosts = host_of[each] >= hosts ? host_of[each] + 1 : hosts;
  }
  must(hosts == count - 5, "an address for each host");
  for (int each = 0; each < world; each++) {
    peers_here += host_of[each] == host_of[rank];
  }
  map_meeting(folder);
  struct channel channel = channel_open(folder, rank);
  connect_all(folder, arguments + 5);
  channel_reply(&channel, "ok");
  struct command command;
  while (channel_next(&channel, &command)) {
    const int is_exchange = strcmp(command.name, "exchange") == 0;
    if (strcmp(command.verb, "free") == 0) {
      free(outgoing);
      free(incoming);
      outgoing = incoming = NULL;
      room = 0;
      channel_reply(&channel, "ok");
    } else if (strcmp(command.verb, "time") != 0) {
      channel_reply(&channel, "ok");
    } else if (is_exchange || strcmp(command.name, "round_trip") == 0) {
      const double of_host = is_exchange ? 2.0 * (hosts - 1) / hosts : 1.0;
      const size_t least = 1, share = (size_t)(of_host * command.number / peers_here);
      const size_t bytes = share > least ? share : least;
      make_room(bytes);
      meet();
      const double start = now();
      for (long done = 0; done < command.iterations; done++) {
        if (is_exchange) {
          move(bytes, bytes);
        } else {
          round_trip(bytes);
        }
      }
      channel_reply(&channel, "ok %.9f", now() - start);
    } else {
      channel_reply(&channel, "no there is no %s here", command.name);
    }
  }
  return 0;
}
