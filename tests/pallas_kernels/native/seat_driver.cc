// A worker is sent away from its caller's CPU and from no other, and may go anywhere once it has arrived. Prints of how
// many CPUs it may run on: at first, after a caller elsewhere, after one where it was seen, after it took part again.
#include "seat.h"

#include <cstdio>

namespace {

int num_allowed() {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  return CPU_COUNT(&allowed);
}

}  // namespace

int main() {
  pagedjax::Seat seat;
  seat.send_away(pagedjax::this_cpu());  // nobody's yet
  int first = num_allowed(), cpu;
  do {
    cpu = pagedjax::this_cpu();
    seat.note();
  } while (pagedjax::this_cpu() != cpu);
  seat.send_away(cpu + 1000);
  int elsewhere = num_allowed();
  seat.send_away(cpu);
  int sent = num_allowed();
  bool is_gone = pagedjax::this_cpu() != cpu;
  seat.note();
  std::printf("%d %d %d %d\n", first, elsewhere, sent, num_allowed());
  return is_gone ? 0 : 1;
}
