/* plan/simulate.h */
