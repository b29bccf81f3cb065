// A worker is sent away from its caller's CPU, and from no other; prints of how many CPUs it may run on, at first, after a
// caller elsewhere and after one where it was seen.
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
  seat.leave(pagedjax::this_cpu());  // nobody's yet
  seat.take();
  int first = num_allowed(), cpu = pagedjax::this_cpu();
  seat.leave(cpu + 1000);
  int elsewhere = num_allowed();
  seat.leave(cpu);
  seat.leave(cpu);
  std::printf("%d %d %d\n", first, elsewhere, num_allowed());
  return pagedjax::this_cpu() == cpu;
}
